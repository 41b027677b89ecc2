/* kvservice.native._native: the table of functions, nothing else. */
#include "kernel.h"
#include "pieces.h"
#include "row_calls.h"
#include "slot_copy.h"
#include "rows.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rows are little endian; the build is optional, the fallback serves"
#endif

static PyObject *call_kernel_names(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    size_t count = 0;
    while (runnable_kernel(count) != NULL) {
        count++;
    }
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(runnable_kernel(i)->name);
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    return names;
}

static PyObject *call_use_kernel(PyObject *module, PyObject *name)
{
    (void)module;
    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "name must be a str");
        return NULL;
    }
    for (size_t i = 0; runnable_kernel(i) != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(name, runnable_kernel(i)->name) == 0) {
            active_kernel = runnable_kernel(i);
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "this processor cannot run kernel '%U'",
                        name);
}

#define FAST(name, function)                                                  \
    {                                                                         \
        name, (PyCFunction)(void (*)(void))function,                          \
            METH_FASTCALL | METH_KEYWORDS, NULL                               \
    }

static PyMethodDef methods[] = {
    FAST("crc32c", call_crc32c),
    FAST("copy_blocks", call_copy_blocks),
    FAST("checksum_blocks", call_checksum_blocks),
    FAST("buffer_address", call_buffer_address),
    FAST("find_rows", call_find_rows),
    FAST("insert_rows", call_insert_rows),
    FAST("remove_rows", call_remove_rows),
    FAST("copy_rows", call_copy_rows),
    FAST("read_rows", call_read_rows),
    FAST("copy_slots", call_copy_slots),
    {"kernel_names", call_kernel_names, METH_NOARGS, NULL},
    {"use_kernel", call_use_kernel, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    choose_kernel();
    return PyModule_AddIntConstant(module, "STREAMING_THRESHOLD_BYTES",
                                   STREAMING_THRESHOLD_BYTES);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvservice.native._native",
    .m_doc = "Bulk copies, checksums and row searches; see __init__.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
