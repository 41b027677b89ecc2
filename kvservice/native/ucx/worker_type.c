/* Worker in Python. */
#include <string.h>

#include "envelope.h"
#include "failures.h"
#include "objects.h"

#define SETTINGS_MAX 64

PyTypeObject *worker_type;

/* `items` keeps the strings alive. */
static Py_ssize_t take_settings(PyObject *items, struct setting *settings)
{
    Py_ssize_t count = PyList_GET_SIZE(items);
    if (count > SETTINGS_MAX) {
        PyErr_Format(PyExc_ValueError, "config must have at most %d settings",
                     SETTINGS_MAX);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        PyObject *name = PyTuple_Check(item) ? PyTuple_GetItem(item, 0) : NULL;
        PyObject *value = name ? PyTuple_GetItem(item, 1) : NULL;
        if (value == NULL || !PyUnicode_Check(name) || !PyUnicode_Check(value)) {
            PyErr_SetString(PyExc_TypeError, "config must map str to str");
            return -1;
        }
        settings[i].name = PyUnicode_AsUTF8(name);
        settings[i].value = PyUnicode_AsUTF8(value);
        if (settings[i].name == NULL || settings[i].value == NULL) {
            return -1;
        }
    }
    return count;
}

static PyObject *take_address(struct worker *worker)
{
    ucp_worker_attr_t attributes = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS};
    ucs_status_t status = ucx.ucp_worker_query(worker->served, &attributes);
    if (status != UCS_OK) {
        return raise_status(status, "cannot ask UCX for the worker's address");
    }
    PyObject *sealed = seal_envelope(ENVELOPE_ADDRESS, "", 0, attributes.address,
                                     attributes.address_length);
    ucx.ucp_worker_release_address(worker->served, attributes.address);
    return sealed;
}

static int open_worker(struct worker_object *object, PyObject *items)
{
    struct setting settings[SETTINGS_MAX];
    char failed[256];
    Py_ssize_t count = take_settings(items, settings);
    if (count < 0) {
        return -1;
    }
    ucs_status_t status;
    Py_BEGIN_ALLOW_THREADS
    status = worker_open(&object->worker, settings, (size_t)count, failed,
                         sizeof(failed));
    Py_END_ALLOW_THREADS
    if (status != UCS_OK) {
        raise_status(status, failed);
        return -1;
    }
    object->address = take_address(&object->worker);
    return object->address ? 0 : -1;
}

static PyObject *worker_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"config", NULL};
    PyObject *config;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:Worker", names, &config)) {
        return NULL;
    }
    if (!ucx.is_loaded) {
        return raise_with_status(unavailable_error, UCS_ERR_NO_RESOURCE,
                                 "no UCX library is loaded: call load first");
    }
    PyObject *items = PyMapping_Items(config);
    if (items == NULL) {
        return NULL;
    }
    struct worker_object *object = (struct worker_object *)type->tp_alloc(type, 0);
    if (object != NULL) {
        object->worker.state = WORKER_CLOSED; /* Nothing to close until it is open. */
        if (open_worker(object, items) < 0) {
            Py_CLEAR(object);
        }
    }
    Py_DECREF(items);
    return (PyObject *)object;
}

static PyObject *worker_close_method(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    worker_close(&((struct worker_object *)self)->worker);
    Py_END_ALLOW_THREADS
    Py_CLEAR(((struct worker_object *)self)->kept);
    Py_RETURN_NONE;
}

static void worker_finalize(PyObject *self)
{
    struct worker *worker = &((struct worker_object *)self)->worker;
    PyObject *type, *value, *traceback;
    if (worker->state != WORKER_OPEN ||
        worker->fork_generation != ucx.fork_generation) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (((struct worker_object *)self)->address != NULL &&
        PyErr_ResourceWarning(self, 1, "unclosed UCX worker %R", self) < 0) {
        PyErr_WriteUnraisable(self);
    }
    Py_BEGIN_ALLOW_THREADS
    worker_close(worker);
    Py_END_ALLOW_THREADS
    PyErr_Restore(type, value, traceback);
}

static void worker_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_CallFinalizerFromDealloc(self) < 0) {
        return;
    }
    Py_CLEAR(((struct worker_object *)self)->address);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *worker_progress_method(PyObject *self, PyObject *unused)
{
    struct worker *worker = &((struct worker_object *)self)->worker;
    enum refusal refusal;
    unsigned moved = 0;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    refusal = worker_enter(worker);
    if (refusal == REFUSED_NOT) {
        moved = worker_progress(worker) + served_progress(worker);
        worker_leave(worker);
    }
    Py_END_ALLOW_THREADS
    if (refusal != REFUSED_NOT) {
        return raise_refusal(refusal, "cannot make progress");
    }
    return PyBool_FromLong(moved != 0);
}

static PyObject *worker_serve_method(PyObject *self, PyObject *argument)
{
    struct worker *worker = &((struct worker_object *)self)->worker;
    int stop_fd = PyObject_AsFileDescriptor(argument);
    if (stop_fd < 0) {
        return NULL;
    }
    enum served served = SERVED;
    do {
        enum refusal refusal;
        Py_BEGIN_ALLOW_THREADS
        refusal = worker_enter(worker);
        if (refusal == REFUSED_NOT) {
            if (worker->is_served) {
                refusal = REFUSED_BUSY;
            } else {
                served = worker_serve(worker, stop_fd);
            }
            worker_leave(worker);
        }
        Py_END_ALLOW_THREADS
        if (refusal == REFUSED_CLOSED && served == SERVE_INTERRUPTED) {
            break; /* It was closed while the signal was looked at. */
        }
        if (refusal != REFUSED_NOT) {
            return raise_refusal(refusal, "cannot serve");
        }
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
    } while (served == SERVE_INTERRUPTED);
    if (served == SERVE_BAD_DESCRIPTOR) {
        return PyErr_Format(PyExc_ValueError, "stop_fd %d is not open", stop_fd);
    }
    Py_RETURN_NONE;
}

static PyObject *worker_get_address(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((struct worker_object *)self)->address);
}

static PyObject *worker_is_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((struct worker_object *)self)->worker.state != WORKER_OPEN);
}

static PyObject *worker_is_poisoned(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((struct worker_object *)self)->worker.is_poisoned);
}

static PyMethodDef methods[] = {
    {"connect", METHOD_WITH_KEYWORDS(worker_connect), METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"register", METHOD_WITH_KEYWORDS(worker_register), METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"transfer", METHOD_WITH_KEYWORDS(worker_transfer), METH_FASTCALL | METH_KEYWORDS,
     NULL},
    {"serve", worker_serve_method, METH_O, NULL},
    {"progress", worker_progress_method, METH_NOARGS, NULL},
    {"close", worker_close_method, METH_NOARGS, NULL},
    {"__enter__", enter_object, METH_NOARGS, NULL},
    {"__exit__", exit_object, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"address", worker_get_address, NULL, NULL, NULL},
    {"is_closed", worker_is_closed, NULL, NULL, NULL},
    {"is_poisoned", worker_is_poisoned, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)worker_new},
    {Py_tp_finalize, (void *)worker_finalize},
    {Py_tp_dealloc, (void *)worker_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "kvservice.native.ucx._ucx.Worker",
    .basicsize = sizeof(struct worker_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int add_worker_type(PyObject *module)
{
    return add_type(module, &spec, &worker_type);
}
