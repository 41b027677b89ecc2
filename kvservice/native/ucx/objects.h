/* The Python types: thin shells around worker.h, endpoint.h and batch.h. A shell
 * holds a reference to what its content lives in, so a worker goes last. */
#ifndef KVSERVICE_UCX_OBJECTS_H
#define KVSERVICE_UCX_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "endpoint.h"
#include "worker.h"

struct worker_object {
    PyObject_HEAD
    struct worker worker;
    PyObject *address; /* sealed; NULL until the worker is open */
    /* What operations that could not be ended still refer to; NULL or a list. */
    PyObject *kept;
};

struct endpoint_object {
    PyObject_HEAD
    struct worker_object *owner;
    struct endpoint endpoint;
};

struct segment_object {
    PyObject_HEAD
    struct endpoint_object *owner;
    struct segment segment;
};

struct registration_object {
    PyObject_HEAD
    struct worker_object *owner;
    PyObject *rkey; /* sealed */
    struct registration registration;
};

extern PyTypeObject *worker_type;
extern PyTypeObject *endpoint_type;
extern PyTypeObject *segment_type;
extern PyTypeObject *registration_type;

/* Each makes its type and adds it to the module; 0 or -1. */
int add_worker_type(PyObject *module);
int add_endpoint_type(PyObject *module);
int add_segment_type(PyObject *module);
int add_registration_type(PyObject *module);
int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type);

/* Like worker_enter, but refuses a closed endpoint too. */
enum refusal endpoint_enter(struct endpoint_object *object);

/* Like raise_status, naming the versions where `envelope` is of another UCX; NULL. */
PyObject *raise_foreign(int status, const char *what, PyObject *envelope);

/* Methods of Endpoint and Worker that stand in files of their own. */
PyObject *endpoint_attach(PyObject *self, PyObject *args, PyObject *keywords);
PyObject *worker_connect(PyObject *self, PyObject *args, PyObject *keywords);
PyObject *worker_register(PyObject *self, PyObject *args, PyObject *keywords);
PyObject *worker_transfer(PyObject *self, PyObject *const *args, Py_ssize_t count,
                          PyObject *keyword_names);

/* `with` for a type that has a method close. */
PyObject *enter_object(PyObject *self, PyObject *unused);
PyObject *exit_object(PyObject *self, PyObject *args);

#define METHOD_WITH_KEYWORDS(function) (PyCFunction)(void (*)(void))(function)

#endif
