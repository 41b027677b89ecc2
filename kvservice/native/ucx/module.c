/* kvservice.native.ucx._ucx: the functions and types, and what they are called. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch.h"
#include "failures.h"
#include "log_ring.h"
#include "objects.h"

static PyObject *call_load(PyObject *module, PyObject *argument)
{
    char reason[512], message[1024];
    PyObject *path;
    (void)module;
    if (!PyUnicode_FSConverter(argument, &path)) {
        return NULL;
    }
    /* With the GIL: a library is loaded by one thread at a time. */
    int status = load_library(PyBytes_AS_STRING(path), reason, sizeof(reason));
    if (status < 0) {
        snprintf(message, sizeof(message), "cannot use the UCX library %.400s: %s",
                 PyBytes_AS_STRING(path), reason);
        raise_with_status(unavailable_error, UCS_ERR_NO_RESOURCE, message);
    }
    Py_DECREF(path);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *call_library_version(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (!ucx.is_loaded) {
        return PyUnicode_FromString("");
    }
    return PyUnicode_FromFormat("%u.%u.%u", ucx.major, ucx.minor, ucx.release);
}

static PyObject *call_library_path(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_DecodeFSDefault(library_path());
}

static PyObject *call_status_text(PyObject *module, PyObject *argument)
{
    int status = (int)PyLong_AsLong(argument);
    (void)module;
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyUnicode_FromString(status_text(status));
}

static int append_text(PyObject *list, PyObject *text)
{
    int status = text ? PyList_Append(list, text) : -1;
    Py_XDECREF(text);
    return status;
}

static PyObject *call_drain_log(PyObject *module, PyObject *unused)
{
    char line[LOG_LINE_BYTES];
    PyObject *lines = PyList_New(0);
    size_t lost = take_lost_lines();
    (void)module;
    (void)unused;
    int status = lines ? 0 : -1;
    if (status == 0 && lost != 0) {
        status = append_text(
            lines, PyUnicode_FromFormat("warning: %zu lines before these were lost", lost));
    }
    while (status == 0 && take_log_line(line)) {
        status = append_text(lines, PyUnicode_DecodeUTF8(line, (Py_ssize_t)strlen(line),
                                                         "replace"));
    }
    if (status < 0) {
        Py_CLEAR(lines);
    }
    return lines;
}

PyObject *enter_object(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

PyObject *exit_object(PyObject *self, PyObject *args)
{
    (void)args;
    return PyObject_CallMethod(self, "close", NULL);
}

int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type == NULL ? -1 : PyModule_AddType(module, *type);
}

static PyMethodDef methods[] = {
    {"load", call_load, METH_O, NULL},
    {"library_version", call_library_version, METH_NOARGS, NULL},
    {"library_path", call_library_path, METH_NOARGS, NULL},
    {"status_text", call_status_text, METH_O, NULL},
    {"drain_log", call_drain_log, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_numbers(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
        {"STATUS_OUTSIDE", STATUS_OUTSIDE},
        {"STATUS_NOT_POSTED", STATUS_NOT_POSTED},
        {"STATUS_UNSETTLED", STATUS_UNSETTLED},
        {"STATUS_UNCONFIRMED", STATUS_UNCONFIRMED},
        {"OUTCOME_DONE", OUTCOME_DONE},
        {"OUTCOME_FAILED", OUTCOME_FAILED},
        {"OUTCOME_DEADLINE", OUTCOME_DEADLINE},
        {"OUTCOME_LOST", OUTCOME_LOST},
        {"OUTCOME_CLOSED", OUTCOME_CLOSED},
        {"WINDOW_MAX", WINDOW_MAX},
        {"LOG_LINES", LOG_LINES},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

static int execute(PyObject *module)
{
    if (find_failures() < 0 || add_worker_type(module) < 0 ||
        add_endpoint_type(module) < 0 || add_segment_type(module) < 0 ||
        add_registration_type(module) < 0) {
        return -1;
    }
    return add_numbers(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvservice.native.ucx._ucx",
    .m_doc = "One-sided transfers over UCX; see __init__.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__ucx(void)
{
    return PyModuleDef_Init(&definition);
}
