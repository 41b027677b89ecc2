/*
 * Arguments of the Python-visible functions: binding of names, and arrays taken
 * through the buffer protocol. The NumPy C API is not used, so that the module
 * does not depend on the NumPy that it was built against.
 */
#ifndef KVSERVICE_ARGUMENTS_H
#define KVSERVICE_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#define ARGUMENTS_MAX 13

/* What an array's items must be. BYTES takes any contiguous buffer. */
enum kind { KIND_BYTES, KIND_U8, KIND_U32, KIND_U64, KIND_I64 };

/* A borrowed buffer; zero-initialised means "none held". */
struct array {
    Py_buffer view;
    void *items;
    Py_ssize_t count; /* items, or bytes for KIND_BYTES; 0 when None. */
    int is_held;
};

struct array_rule {
    enum kind kind;
    int is_writable;
    int may_be_none;
};

struct signature {
    const char *function;
    const char *const *names; /* NULL-terminated */
    size_t required_count;
};

/* Fills `values` (borrowed references, NULL where left out). */
int bind_arguments(const struct signature *signature, PyObject *const *args,
                   Py_ssize_t positional_count, PyObject *keyword_names,
                   PyObject **values);

/* Each returns 0, or -1 with an exception that names the argument. */
int take_array(PyObject *object, const char *name, struct array_rule rule,
               struct array *array);
int take_unsigned(PyObject *object, const char *name, uint64_t limit,
                  uint64_t *value);
int require_count(const struct array *array, const char *name,
                  Py_ssize_t count);

void release_arrays(struct array *arrays, size_t count);

#endif
