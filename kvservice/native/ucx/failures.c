#include "failures.h"

#include <stdio.h>

#include "library.h"

PyObject *ucx_error;
PyObject *unavailable_error;
PyObject *unsettled_error;
PyObject *malformed_error;

static PyObject *take_class(const char *module_name, const char *name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return found;
}

int find_failures(void)
{
    static const char *const ours = "kvservice.native.ucx.failures";
    ucx_error = take_class(ours, "UcxError");
    unavailable_error = ucx_error ? take_class(ours, "UcxUnavailableError") : NULL;
    unsettled_error = unavailable_error ? take_class(ours, "UnsettledError") : NULL;
    malformed_error =
        unsettled_error ? take_class("kvservice.core.errors", "MalformedError") : NULL;
    return malformed_error ? 0 : -1;
}

PyObject *raise_with_status(PyObject *type, int status, const char *message)
{
    PyObject *failure = PyObject_CallFunction(type, "si", message, status);
    if (failure != NULL) {
        PyErr_SetObject(type, failure);
        Py_DECREF(failure);
    }
    return NULL;
}

PyObject *raise_status(int status, const char *what)
{
    char message[256];
    snprintf(message, sizeof(message), "%s: %s (status %d)", what,
             status_text(status), status);
    return raise_with_status(ucx_error, status, message);
}

PyObject *raise_refusal(enum refusal refusal, const char *what)
{
    char message[256];
    static const char *const reasons[] = {
        [REFUSED_FORKED] = "this process was forked after UCX was opened; start it "
                           "by exec, and open UCX in it",
        [REFUSED_CLOSED] = "it is closed, or its worker is",
        [REFUSED_POISONED] = "an operation of this worker could not be ended and may "
                             "still touch local memory; close the worker",
        [REFUSED_BUSY] = "another thread does that already",
        [REFUSED_FOREIGN] = "segment, endpoint or registration of another worker",
    };
    snprintf(message, sizeof(message), "%s: %s", what, reasons[refusal]);
    return raise_with_status(refusal == REFUSED_POISONED ? unsettled_error : ucx_error,
                             UCS_ERR_REJECTED, message);
}
