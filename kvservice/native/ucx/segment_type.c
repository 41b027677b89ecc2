/* RemoteSegment in Python. */
#include <string.h>

#include "envelope.h"
#include "failures.h"
#include "objects.h"

PyTypeObject *segment_type;

/* The range that is asked for must be part of what the peer registered. */
static const uint8_t *open_rkey(PyObject *sealed, uint64_t base, uint64_t length)
{
    uint64_t range[2];
    size_t body_bytes;
    const uint8_t *body = open_envelope(sealed, ENVELOPE_RKEY, &body_bytes);
    if (body == NULL) {
        return NULL;
    }
    if (body_bytes <= sizeof(range)) {
        PyErr_SetString(malformed_error, "the remote key is too short");
        return NULL;
    }
    memcpy(range, body, sizeof(range));
    if (length == 0 || length > range[1] || base - range[0] > range[1] - length) {
        PyErr_Format(PyExc_ValueError,
                     "[%llu, +%llu) is not within the registration [%llu, +%llu)",
                     base, length, range[0], range[1]);
        return NULL;
    }
    return body + sizeof(range);
}

PyObject *endpoint_attach(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rkey", "base", "length", NULL};
    struct endpoint_object *owner = (struct endpoint_object *)self;
    PyObject *sealed;
    unsigned long long base, length;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKK:attach", names, &sealed,
                                     &base, &length)) {
        return NULL;
    }
    const uint8_t *rkey = open_rkey(sealed, base, length);
    if (rkey == NULL) {
        return NULL;
    }
    struct segment_object *object =
        (struct segment_object *)segment_type->tp_alloc(segment_type, 0);
    if (object == NULL) {
        return NULL;
    }
    object->owner = (struct endpoint_object *)Py_NewRef(self);
    object->segment.base = base;
    object->segment.length_bytes = length;
    enum refusal refusal;
    ucs_status_t status = UCS_OK;
    Py_BEGIN_ALLOW_THREADS
    refusal = endpoint_enter(owner);
    if (refusal == REFUSED_NOT) {
        status = owner->endpoint.handle == NULL
                     ? UCS_ERR_NOT_CONNECTED
                     : segment_attach(&object->segment, &owner->endpoint, rkey);
        worker_leave(&owner->owner->worker);
    }
    Py_END_ALLOW_THREADS
    if (refusal != REFUSED_NOT || status != UCS_OK) {
        Py_DECREF(object);
        return refusal != REFUSED_NOT ? raise_refusal(refusal, "cannot attach")
                                      : raise_foreign(status, "cannot use this remote key",
                                                      sealed);
    }
    return (PyObject *)object;
}

static void close_segment(struct segment_object *object, int is_entered)
{
    if (is_entered) {
        segment_close(&object->segment);
        worker_leave(&object->owner->owner->worker);
    }
}

static PyObject *segment_close_method(PyObject *self, PyObject *unused)
{
    struct segment_object *object = (struct segment_object *)self;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    close_segment(object, worker_enter(&object->owner->owner->worker) == REFUSED_NOT);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void segment_dealloc(PyObject *self)
{
    struct segment_object *object = (struct segment_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (object->owner != NULL) {
        Py_BEGIN_ALLOW_THREADS
        close_segment(object, worker_enter_to_free(&object->owner->owner->worker));
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(object->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *segment_get_base(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((struct segment_object *)self)->segment.base);
}

static PyObject *segment_get_length(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(
        ((struct segment_object *)self)->segment.length_bytes);
}

static PyMethodDef methods[] = {
    {"close", segment_close_method, METH_NOARGS, NULL},
    {"__enter__", enter_object, METH_NOARGS, NULL},
    {"__exit__", exit_object, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"base", segment_get_base, NULL, NULL, NULL},
    {"length", segment_get_length, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, (void *)segment_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "kvservice.native.ucx._ucx.RemoteSegment",
    .basicsize = sizeof(struct segment_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int add_segment_type(PyObject *module)
{
    return add_type(module, &spec, &segment_type);
}
