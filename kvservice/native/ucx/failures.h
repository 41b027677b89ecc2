/* The exceptions that the functions here raise; borrowed for the whole life of
 * the process once the module is there. */
#ifndef KVSERVICE_UCX_FAILURES_H
#define KVSERVICE_UCX_FAILURES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "worker.h"

extern PyObject *ucx_error;
extern PyObject *unavailable_error;
extern PyObject *unsettled_error;
extern PyObject *malformed_error;

int find_failures(void);

/* Each returns NULL. */
PyObject *raise_status(int status, const char *what);
PyObject *raise_refusal(enum refusal refusal, const char *what);
PyObject *raise_with_status(PyObject *type, int status, const char *message);

#endif
