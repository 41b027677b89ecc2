/* Worker.transfer: arguments in, one batch, and the outcome or an exception. */
#include <string.h>

#include "../arguments.h"
#include "batch.h"
#include "failures.h"
#include "objects.h"

#define DEFAULT_GRACE_NS 1000000000ull
#define SEGMENTS_ON_STACK 16

enum { INDEXES, LOCAL, REMOTE, LENGTHS, ARRAYS };

/* All that one call holds; zero-initialised, and let go of by end_call. */
struct call {
    struct array arrays[ARRAYS];
    Py_buffer statuses;
    int has_statuses;
    PyObject *segments; /* a tuple of our own: the caller's list may change */
    PyObject *memory;   /* borrowed */
    struct segment *on_stack[SEGMENTS_ON_STACK];
    struct transfer transfer;
};

static int take_statuses(PyObject *object, struct call *call)
{
    if (PyObject_GetBuffer(object, &call->statuses,
                           PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        return -1;
    }
    call->has_statuses = 1;
    const char *format = call->statuses.format ? call->statuses.format : "B";
    if (*format == '<' || *format == '=' || *format == '@') {
        format++;
    }
    if (call->statuses.ndim != 1 || call->statuses.itemsize != 4 ||
        (strcmp(format, "i") != 0 && strcmp(format, "l") != 0) ||
        (uintptr_t)call->statuses.buf % 4 != 0) {
        PyErr_SetString(PyExc_ValueError, "statuses must be a writable contiguous, "
                                          "aligned 1-D array of int32");
        return -1;
    }
    if ((size_t)(call->statuses.len / 4) != call->transfer.count) {
        PyErr_Format(PyExc_ValueError, "statuses must have %zu items, not %zd",
                     call->transfer.count, call->statuses.len / 4);
        return -1;
    }
    call->transfer.statuses = call->statuses.buf;
    return 0;
}

static int take_arrays(PyObject **values, struct call *call)
{
    const struct array_rule u32 = {KIND_U32, 0, 0};
    const struct array_rule u64 = {KIND_U64, 0, 0};
    struct array *arrays = call->arrays;
    if (take_array(values[2], "segment_indexes", u32, &arrays[INDEXES]) < 0 ||
        take_array(values[3], "local", u64, &arrays[LOCAL]) < 0 ||
        take_array(values[4], "remote", u64, &arrays[REMOTE]) < 0 ||
        take_array(values[5], "lengths", u64, &arrays[LENGTHS]) < 0 ||
        require_count(&arrays[LOCAL], "local", arrays[INDEXES].count) < 0 ||
        require_count(&arrays[REMOTE], "remote", arrays[INDEXES].count) < 0 ||
        require_count(&arrays[LENGTHS], "lengths", arrays[INDEXES].count) < 0) {
        return -1;
    }
    if (arrays[INDEXES].count > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a batch must have fewer operations");
        return -1;
    }
    call->transfer.count = (size_t)arrays[INDEXES].count;
    call->transfer.segment_indexes = arrays[INDEXES].items;
    call->transfer.local = arrays[LOCAL].items;
    call->transfer.remote = arrays[REMOTE].items;
    call->transfer.lengths = arrays[LENGTHS].items;
    return take_statuses(values[6], call);
}

static int take_segments(PyObject *sequence, struct call *call)
{
    call->segments = PySequence_Tuple(sequence);
    if (call->segments == NULL) {
        return -1;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(call->segments);
    call->transfer.segments = count <= SEGMENTS_ON_STACK
                                  ? call->on_stack
                                  : PyMem_New(struct segment *, count);
    if (call->transfer.segments == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->transfer.segments_count = count;
    for (size_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(call->segments, (Py_ssize_t)i);
        if (!Py_IS_TYPE(item, segment_type)) {
            PyErr_Format(PyExc_TypeError, "segments must hold RemoteSegment, not %s",
                         Py_TYPE(item)->tp_name);
            return -1;
        }
        call->transfer.segments[i] = &((struct segment_object *)item)->segment;
    }
    return 0;
}

static int take_typed(PyObject *object, const char *name, PyTypeObject *type)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (!Py_IS_TYPE(object, type)) {
        PyErr_Format(PyExc_TypeError, "%s must be %s or None, not %s", name,
                     type->tp_name, Py_TYPE(object)->tp_name);
        return -1;
    }
    return 1;
}

static int take_limits(PyObject **values, struct call *call)
{
    uint64_t window, deadline_ns, grace_ns = DEFAULT_GRACE_NS;
    if (take_unsigned(values[7], "window", WINDOW_MAX, &window) < 0 ||
        take_unsigned(values[8], "deadline_ns", INT64_MAX, &deadline_ns) < 0 ||
        (values[11] != NULL &&
         take_unsigned(values[11], "grace_ns", 1000 * DEFAULT_GRACE_NS, &grace_ns) < 0)) {
        return -1;
    }
    if (window == 0) {
        PyErr_SetString(PyExc_ValueError, "window must be at least 1");
        return -1;
    }
    call->transfer.window = (uint32_t)window;
    call->transfer.deadline_ns = (int64_t)deadline_ns;
    call->transfer.grace_ns = (int64_t)grace_ns;
    return 0;
}

static int take_call(PyObject **values, struct call *call)
{
    call->transfer.is_put = PyObject_IsTrue(values[0]);
    if (call->transfer.is_put < 0 || take_segments(values[1], call) < 0 ||
        take_arrays(values, call) < 0 || take_limits(values, call) < 0) {
        return -1;
    }
    int has_watched = take_typed(values[9], "watched", endpoint_type);
    int has_memory = take_typed(values[10], "local_memory", registration_type);
    if (has_watched > 0) {
        call->transfer.watched = &((struct endpoint_object *)values[9])->endpoint;
    }
    if (has_memory > 0) {
        call->memory = values[10];
        call->transfer.local_memory =
            &((struct registration_object *)values[10])->registration;
    }
    return has_watched < 0 || has_memory < 0 ? -1 : 0;
}

static void end_call(struct call *call)
{
    release_arrays(call->arrays, ARRAYS);
    if (call->has_statuses) {
        PyBuffer_Release(&call->statuses);
    }
    if (call->transfer.segments != call->on_stack) {
        PyMem_Free(call->transfer.segments);
    }
    Py_XDECREF(call->segments);
}

enum fault { FAULT_NONE, FAULT_INDEX, FAULT_MEMORY };

/* Of the caller's own arrays; `place` is the operation. */
static enum fault check_operations(const struct transfer *transfer, size_t *place)
{
    const struct registration *memory = transfer->local_memory;
    for (*place = 0; *place < transfer->count; (*place)++) {
        if (transfer->segment_indexes[*place] >= transfer->segments_count) {
            return FAULT_INDEX;
        }
        uint64_t length = transfer->lengths[*place];
        if (memory != NULL && length != 0 &&
            (length > memory->length_bytes ||
             transfer->local[*place] - memory->base > memory->length_bytes - length)) {
            return FAULT_MEMORY;
        }
    }
    return FAULT_NONE;
}

/* Whether all that the call names is open and of this worker; with its lock. */
static enum refusal check_open(const struct worker *worker,
                               const struct transfer *transfer)
{
    if (worker->is_poisoned) {
        return REFUSED_POISONED;
    }
    for (size_t i = 0; i < transfer->segments_count; i++) {
        const struct segment *segment = transfer->segments[i];
        if (segment->endpoint == NULL || segment->is_closing ||
            segment->endpoint->is_closing) {
            return REFUSED_CLOSED;
        }
        if (segment->endpoint->worker != worker) {
            return REFUSED_FOREIGN;
        }
    }
    const struct endpoint *watched = transfer->watched;
    const struct registration *memory = transfer->local_memory;
    if ((watched != NULL && (watched->worker == NULL || watched->is_closing)) ||
        (memory != NULL && (memory->worker == NULL || memory->is_closing))) {
        return REFUSED_CLOSED;
    }
    if ((watched != NULL && watched->worker != worker) ||
        (memory != NULL && memory->worker != worker)) {
        return REFUSED_FOREIGN;
    }
    return REFUSED_NOT;
}

/* Operations are under way for good: what they refer to must outlive them. */
static PyObject *keep_and_raise(struct worker_object *owner, struct call *call)
{
    PyObject *kept = PyTuple_Pack(2, call->segments, call->memory ? call->memory : Py_None);
    if (owner->kept == NULL) {
        owner->kept = PyList_New(0);
    }
    if (kept == NULL || owner->kept == NULL || PyList_Append(owner->kept, kept) < 0) {
        PyErr_Clear();
        Py_XINCREF(kept); /* Lost, but alive. */
    }
    Py_XDECREF(kept);
    return raise_with_status(
        unsettled_error, STATUS_UNSETTLED,
        "operations did not end in time and cannot be cut off: they may still touch "
        "local memory, so keep it until this worker is closed");
}

static PyObject *run_call(struct worker_object *owner, struct call *call)
{
    struct worker *worker = &owner->worker;
    enum outcome outcome = OUTCOME_DONE;
    enum refusal refusal = REFUSED_NOT;
    enum fault fault;
    size_t place;
    Py_BEGIN_ALLOW_THREADS
    fault = check_operations(&call->transfer, &place);
    if (fault == FAULT_NONE) {
        refusal = worker_enter(worker);
    }
    if (fault == FAULT_NONE && refusal == REFUSED_NOT) {
        refusal = check_open(worker, &call->transfer);
        if (refusal == REFUSED_NOT) {
            outcome = batch_run(worker, &call->transfer);
        }
        worker_leave(worker);
    }
    Py_END_ALLOW_THREADS
    if (fault != FAULT_NONE) {
        return PyErr_Format(PyExc_ValueError,
                            fault == FAULT_INDEX
                                ? "operation %zu: its segment index is too large"
                                : "operation %zu: its local range is not within "
                                  "local_memory",
                            place);
    }
    if (refusal != REFUSED_NOT) {
        return raise_refusal(refusal, "cannot transfer");
    }
    if (outcome == OUTCOME_NO_MEMORY) {
        return PyErr_NoMemory();
    }
    if (outcome == OUTCOME_UNSETTLED) {
        return keep_and_raise(owner, call);
    }
    return PyLong_FromLong(outcome);
}

PyObject *worker_transfer(PyObject *self, PyObject *const *args, Py_ssize_t count,
                          PyObject *keyword_names)
{
    static const char *const names[] = {
        "is_put",   "segments", "segment_indexes", "local",        "remote",
        "lengths",  "statuses", "window",          "deadline_ns",  "watched",
        "local_memory", "grace_ns", NULL};
    static const struct signature signature = {"transfer", names, 9};
    PyObject *values[ARGUMENTS_MAX];
    struct call call;
    if (count != 0) {
        PyErr_SetString(PyExc_TypeError, "transfer() takes keyword arguments only");
        return NULL;
    }
    if (bind_arguments(&signature, args, count, keyword_names, values) < 0) {
        return NULL;
    }
    memset(&call, 0, sizeof(call));
    PyObject *answer = NULL;
    if (take_call(values, &call) == 0) {
        answer = run_call((struct worker_object *)self, &call);
    }
    end_call(&call);
    return answer;
}
