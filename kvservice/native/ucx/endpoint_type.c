/* Endpoint in Python. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "envelope.h"
#include "failures.h"
#include "objects.h"

PyTypeObject *endpoint_type;

enum refusal endpoint_enter(struct endpoint_object *object)
{
    enum refusal refusal = worker_enter(&object->owner->worker);
    if (refusal == REFUSED_NOT && object->endpoint.is_closing) {
        worker_leave(&object->owner->worker);
        refusal = REFUSED_CLOSED;
    }
    return refusal;
}

PyObject *raise_foreign(int status, const char *what, PyObject *envelope)
{
    char message[256], words[ENVELOPE_WORDS_BYTES];
    snprintf(message, sizeof(message), "%s%s", what, packed_elsewhere(envelope, words));
    return raise_status(status, message);
}

PyObject *worker_connect(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"peer_address", "is_watched", NULL};
    PyObject *address;
    int is_watched;
    size_t body_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O$p:connect", names, &address,
                                     &is_watched)) {
        return NULL;
    }
    const uint8_t *body = open_envelope(address, ENVELOPE_ADDRESS, &body_bytes);
    if (body == NULL) {
        return NULL;
    }
    struct endpoint_object *object =
        (struct endpoint_object *)endpoint_type->tp_alloc(endpoint_type, 0);
    if (object == NULL) {
        return NULL;
    }
    object->owner = (struct worker_object *)Py_NewRef(self);
    object->endpoint.is_watched = is_watched;
    struct worker *worker = &object->owner->worker;
    enum refusal refusal;
    ucs_status_t status = UCS_OK;
    Py_BEGIN_ALLOW_THREADS
    refusal = worker_enter(worker);
    if (refusal == REFUSED_NOT) {
        status = endpoint_open(&object->endpoint, worker, body);
        worker_leave(worker);
    }
    Py_END_ALLOW_THREADS
    if (refusal != REFUSED_NOT) {
        Py_DECREF(object);
        return raise_refusal(refusal, "cannot connect");
    }
    if (status != UCS_OK) {
        Py_DECREF(object);
        return raise_foreign(status, "cannot connect to the peer", address);
    }
    return (PyObject *)object;
}

static PyObject *endpoint_wire_method(PyObject *self, PyObject *argument)
{
    struct endpoint_object *object = (struct endpoint_object *)self;
    long long deadline_ns = PyLong_AsLongLong(argument);
    if (deadline_ns == -1 && PyErr_Occurred()) {
        return NULL;
    }
    enum refusal refusal;
    int is_wired = 0;
    Py_BEGIN_ALLOW_THREADS
    refusal = endpoint_enter(object);
    if (refusal == REFUSED_NOT) {
        is_wired = endpoint_wire(&object->endpoint, deadline_ns);
        worker_leave(&object->owner->worker);
    }
    Py_END_ALLOW_THREADS
    if (refusal != REFUSED_NOT) {
        return raise_refusal(refusal, "cannot wire up the endpoint");
    }
    return PyBool_FromLong(is_wired);
}

static PyObject *endpoint_describe(PyObject *self, PyObject *unused)
{
    struct endpoint_object *object = (struct endpoint_object *)self;
    enum refusal refusal;
    char *text = NULL;
    size_t text_bytes = 0;
    (void)unused;
    FILE *stream = open_memstream(&text, &text_bytes);
    if (stream == NULL) {
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    refusal = endpoint_enter(object);
    if (refusal == REFUSED_NOT) {
        if (object->endpoint.handle != NULL) {
            ucx.ucp_ep_print_info(object->endpoint.handle, stream);
        }
        worker_leave(&object->owner->worker);
    }
    Py_END_ALLOW_THREADS
    fclose(stream);
    PyObject *answer =
        refusal != REFUSED_NOT
            ? raise_refusal(refusal, "cannot describe the endpoint")
            : PyUnicode_DecodeUTF8(text, (Py_ssize_t)text_bytes, "replace");
    free(text);
    return answer;
}

static void close_endpoint(struct endpoint_object *object, int is_entered)
{
    struct worker *worker = &object->owner->worker;
    if (is_entered) {
        worker_begin(worker);
        endpoint_close(&object->endpoint, monotonic_ns() + CLOSE_GRACE_NS);
        worker_end(worker);
        worker_leave(worker);
    }
}

static PyObject *endpoint_close_method(PyObject *self, PyObject *unused)
{
    struct endpoint_object *object = (struct endpoint_object *)self;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    close_endpoint(object, worker_enter(&object->owner->worker) == REFUSED_NOT);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void endpoint_dealloc(PyObject *self)
{
    struct endpoint_object *object = (struct endpoint_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (object->owner != NULL) {
        Py_BEGIN_ALLOW_THREADS
        close_endpoint(object, worker_enter_to_free(&object->owner->worker));
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(object->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *endpoint_get_failure(PyObject *self, void *unused)
{
    const struct endpoint *endpoint = &((struct endpoint_object *)self)->endpoint;
    (void)unused;
    if (endpoint->failure != UCS_OK) {
        return PyUnicode_FromFormat("%s (status %d)", status_text(endpoint->failure),
                                    endpoint->failure);
    }
    if (endpoint->is_cut_off && !endpoint->is_closing) {
        return PyUnicode_FromString("Cut off, since operations did not end in time");
    }
    Py_RETURN_NONE;
}

static PyObject *endpoint_get_is_watched(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((struct endpoint_object *)self)->endpoint.is_watched);
}

static PyObject *endpoint_get_is_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((struct endpoint_object *)self)->endpoint.worker == NULL);
}

static PyMethodDef methods[] = {
    {"wire", endpoint_wire_method, METH_O, NULL},
    {"describe", endpoint_describe, METH_NOARGS, NULL},
    {"attach", METHOD_WITH_KEYWORDS(endpoint_attach), METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"close", endpoint_close_method, METH_NOARGS, NULL},
    {"__enter__", enter_object, METH_NOARGS, NULL},
    {"__exit__", exit_object, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"failure", endpoint_get_failure, NULL, NULL, NULL},
    {"is_watched", endpoint_get_is_watched, NULL, NULL, NULL},
    {"is_closed", endpoint_get_is_closed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, (void *)endpoint_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "kvservice.native.ucx._ucx.Endpoint",
    .basicsize = sizeof(struct endpoint_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int add_endpoint_type(PyObject *module)
{
    return add_type(module, &spec, &endpoint_type);
}
