#include "arguments.h"

#include <string.h>

static int place_keyword(const struct signature *signature, PyObject *name,
                         PyObject *value, PyObject **values)
{
    for (size_t i = 0; signature->names[i] != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) != 0) {
            continue;
        }
        if (values[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got two values for '%U'",
                         signature->function, name);
            return -1;
        }
        values[i] = value;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() has no argument '%U'",
                 signature->function, name);
    return -1;
}

int bind_arguments(const struct signature *signature, PyObject *const *args,
                   Py_ssize_t positional_count, PyObject *keyword_names,
                   PyObject **values)
{
    size_t count = 0;
    for (; signature->names[count] != NULL; count++) {
        values[count] = NULL;
    }
    if ((size_t)positional_count > count) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zu arguments, not %zd",
                     signature->function, count, positional_count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < positional_count; i++) {
        values[i] = args[i];
    }
    Py_ssize_t keywords = keyword_names ? PyTuple_GET_SIZE(keyword_names) : 0;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        if (place_keyword(signature, PyTuple_GET_ITEM(keyword_names, i),
                          args[positional_count + i], values) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < signature->required_count; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() misses the argument '%s'",
                         signature->function, signature->names[i]);
            return -1;
        }
    }
    return 0;
}

static Py_ssize_t item_bytes(enum kind kind)
{
    switch (kind) {
    case KIND_U64:
    case KIND_I64:
        return 8;
    case KIND_U32:
        return 4;
    default:
        return 1;
    }
}

static const char *item_codes(enum kind kind)
{
    switch (kind) {
    case KIND_U64:
        return "LQ";
    case KIND_I64:
        return "lq";
    case KIND_U32:
        return "IL";
    default:
        return "B";
    }
}

static const char *item_word(enum kind kind)
{
    switch (kind) {
    case KIND_U64:
        return "uint64";
    case KIND_I64:
        return "int64";
    case KIND_U32:
        return "uint32";
    default:
        return "uint8";
    }
}

static int has_items(const Py_buffer *view, enum kind kind)
{
    const char *format = view->format ? view->format : "B";
    if (*format == '<' || *format == '=' || *format == '@') {
        format++;
    }
    return view->ndim == 1 && view->itemsize == item_bytes(kind) &&
           format[0] != '\0' && format[1] == '\0' &&
           strchr(item_codes(kind), format[0]) != NULL &&
           (uintptr_t)view->buf % (uintptr_t)view->itemsize == 0;
}

static int refuse_array(const char *name, struct array_rule rule)
{
    if (rule.kind == KIND_BYTES) {
        PyErr_Format(PyExc_ValueError, "%s must be a %scontiguous buffer", name,
                     rule.is_writable ? "writable " : "");
    } else {
        PyErr_Format(PyExc_ValueError,
                     "%s must be a %scontiguous, aligned 1-D array of %s", name,
                     rule.is_writable ? "writable " : "", item_word(rule.kind));
    }
    return -1;
}

int take_array(PyObject *object, const char *name, struct array_rule rule,
               struct array *array)
{
    if (object == Py_None && rule.may_be_none) {
        return 0;
    }
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s must support the buffer protocol, not %s",
                     name, Py_TYPE(object)->tp_name);
        return -1;
    }
    int flags = rule.kind == KIND_BYTES ? PyBUF_SIMPLE : PyBUF_ND | PyBUF_FORMAT;
    if (rule.is_writable) {
        flags |= PyBUF_WRITABLE;
    }
    if (PyObject_GetBuffer(object, &array->view, flags) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_BufferError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear();
        return refuse_array(name, rule);
    }
    array->is_held = 1;
    if (rule.kind != KIND_BYTES && !has_items(&array->view, rule.kind)) {
        return refuse_array(name, rule);
    }
    array->items = array->view.buf;
    array->count = array->view.len / item_bytes(rule.kind);
    return 0;
}

int take_unsigned(PyObject *object, const char *name, uint64_t limit,
                  uint64_t *value)
{
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) {
        return -1;
    }
    unsigned long long got = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
            return -1;
        }
        PyErr_Clear();
    } else if (got <= limit) {
        *value = got;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be between 0 and %llu", name,
                 (unsigned long long)limit);
    return -1;
}

int require_count(const struct array *array, const char *name, Py_ssize_t count)
{
    if (array->count == count) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must have %zd items, not %zd", name,
                 count, array->count);
    return -1;
}

void release_arrays(struct array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (arrays[i].is_held) {
            PyBuffer_Release(&arrays[i].view);
            arrays[i].is_held = 0;
        }
    }
}
