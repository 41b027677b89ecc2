/* The Python-visible functions on the row table. */
#ifndef KVSERVICE_ROW_CALLS_H
#define KVSERVICE_ROW_CALLS_H

#include "arguments.h"

PyObject *call_find_rows(PyObject *module, PyObject *const *args,
                         Py_ssize_t count, PyObject *keyword_names);
PyObject *call_insert_rows(PyObject *module, PyObject *const *args,
                           Py_ssize_t count, PyObject *keyword_names);
PyObject *call_remove_rows(PyObject *module, PyObject *const *args,
                           Py_ssize_t count, PyObject *keyword_names);
PyObject *call_copy_rows(PyObject *module, PyObject *const *args,
                         Py_ssize_t count, PyObject *keyword_names);
PyObject *call_read_rows(PyObject *module, PyObject *const *args,
                         Py_ssize_t count, PyObject *keyword_names);

#endif
