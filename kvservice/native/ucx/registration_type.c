/* Registration in Python. */
#include <string.h>

#include "envelope.h"
#include "failures.h"
#include "objects.h"

PyTypeObject *registration_type;

static int take_memory_kind(const char *word, ucs_memory_type_t *type)
{
    if (strcmp(word, "host") == 0) {
        *type = UCS_MEMORY_TYPE_HOST;
    } else if (strcmp(word, "cuda") == 0) {
        *type = UCS_MEMORY_TYPE_CUDA;
    } else {
        PyErr_Format(PyExc_ValueError, "memory_kind must be host or cuda, not '%s'",
                     word);
        return -1;
    }
    return 0;
}

/* Both with the worker's lock. */
static ucs_status_t register_memory(struct registration *registration,
                                    struct worker *worker, void **packed,
                                    size_t *packed_bytes)
{
    ucs_status_t status = registration_open(registration, worker);
    if (status == UCS_OK) {
        status = ucx.ucp_rkey_pack(worker->context, registration->handle, packed,
                                   packed_bytes);
        if (status != UCS_OK) {
            registration_close(registration);
        }
    }
    return status;
}

static PyObject *seal_rkey(const struct registration *registration,
                           const void *packed, size_t packed_bytes)
{
    const uint64_t range[2] = {registration->base, registration->length_bytes};
    return seal_envelope(ENVELOPE_RKEY, range, sizeof(range), packed, packed_bytes);
}

static PyObject *open_registration(struct registration_object *object)
{
    struct worker *worker = &object->owner->worker;
    enum refusal refusal;
    ucs_status_t status = UCS_OK;
    void *packed = NULL;
    size_t packed_bytes = 0;
    Py_BEGIN_ALLOW_THREADS
    refusal = worker_enter(worker);
    if (refusal == REFUSED_NOT) {
        status = register_memory(&object->registration, worker, &packed, &packed_bytes);
        worker_leave(worker);
    }
    Py_END_ALLOW_THREADS
    if (refusal != REFUSED_NOT) {
        return raise_refusal(refusal, "cannot register memory");
    }
    if (status != UCS_OK) {
        return raise_status(status, "cannot register this memory with UCX");
    }
    object->rkey = seal_rkey(&object->registration, packed, packed_bytes);
    ucx.ucp_rkey_buffer_release(packed);
    return object->rkey;
}

PyObject *worker_register(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"address", "length", "memory_kind", NULL};
    unsigned long long address, length;
    const char *kind = "host";
    ucs_memory_type_t type;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "KK|s:register", names, &address,
                                     &length, &kind) ||
        take_memory_kind(kind, &type) < 0) {
        return NULL;
    }
    if (address == 0 || length == 0 || address + length < address) {
        PyErr_SetString(PyExc_ValueError,
                        "address and length must name a range of this process");
        return NULL;
    }
    struct registration_object *object =
        (struct registration_object *)registration_type->tp_alloc(registration_type, 0);
    if (object == NULL) {
        return NULL;
    }
    object->owner = (struct worker_object *)Py_NewRef(self);
    object->registration.base = address;
    object->registration.length_bytes = length;
    object->registration.memory_type = type;
    if (open_registration(object) == NULL) {
        Py_CLEAR(object);
    }
    return (PyObject *)object;
}

static void close_registration(struct registration_object *object)
{
    struct worker *worker = &object->owner->worker;
    Py_BEGIN_ALLOW_THREADS
    if (worker_enter(worker) == REFUSED_NOT) {
        registration_close(&object->registration);
        worker_leave(worker);
    }
    Py_END_ALLOW_THREADS
}

static PyObject *registration_close_method(PyObject *self, PyObject *unused)
{
    (void)unused;
    close_registration((struct registration_object *)self);
    Py_RETURN_NONE;
}

static PyObject *get_rkey(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((struct registration_object *)self)->rkey);
}

static PyObject *get_address(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(
        ((struct registration_object *)self)->registration.base);
}

static PyObject *get_length(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(
        ((struct registration_object *)self)->registration.length_bytes);
}

static PyMethodDef methods[] = {
    {"close", registration_close_method, METH_NOARGS, NULL},
    {"__enter__", enter_object, METH_NOARGS, NULL},
    {"__exit__", exit_object, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"rkey", get_rkey, NULL, NULL, NULL},
    {"address", get_address, NULL, NULL, NULL},
    {"length", get_length, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static void registration_dealloc(PyObject *self)
{
    struct registration_object *object = (struct registration_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (object->owner != NULL) {
        struct worker *worker = &object->owner->worker;
        Py_BEGIN_ALLOW_THREADS
        if (worker_enter_to_free(worker)) {
            registration_close(&object->registration);
            worker_leave(worker);
        }
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(object->rkey);
    Py_CLEAR(object->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_dealloc, (void *)registration_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "kvservice.native.ucx._ucx.Registration",
    .basicsize = sizeof(struct registration_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int add_registration_type(PyObject *module)
{
    return add_type(module, &spec, &registration_type);
}
