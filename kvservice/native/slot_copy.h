/*
 * The copy under a capability: between a caller's pieces and slots whose place
 * and generation are known, with the generations looked at before and after.
 */
#ifndef KVSERVICE_SLOT_COPY_H
#define KVSERVICE_SLOT_COPY_H

#include "pieces.h"

/* The codes of SlotOutcome in kvservice/core/row_layout.py. */
enum slot_outcome {
    SLOTS_COPIED = 0,
    SLOT_UNMAPPED = 1,
    SLOT_OUTSIDE = 2,
    SLOT_STALE = 3, /* before the copy: nothing was touched. */
    SLOT_MOVED = 4, /* during the copy. */
};

PyObject *call_copy_slots(PyObject *module, PyObject *const *args,
                          Py_ssize_t count, PyObject *keyword_names);

#endif
