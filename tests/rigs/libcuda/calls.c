/* What every call goes through, the calls about the driver, the device and its context, and what a test sets and reads.
   See standin.h. */

#include "standin.h"

#include <cudaTypedefs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAMES_MAX 64
#define VIOLATIONS_MAX 64
#define VIOLATION_BYTES 200

Settings settings;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed;
CUresult lost;
unsigned life;

/* How often one call was made, and which calls of it shall fail. */
typedef struct {
    char name[48];
    uint64_t calls;
    uint64_t fails_at, fails_until; /* of `calls` */
    double chance;
    CUresult result;
    bool loses_device;
} Call;

static Call calls[NAMES_MAX];
static char violations[VIOLATIONS_MAX][VIOLATION_BYTES];
static size_t violation_count;
static uint64_t random_state = 1;
static int the_context; /* its address is the primary context's handle */
static __thread CUcontext current_context;
static __thread bool is_spared;

CUresult standin_batch_of_12_8(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
                               size_t *, CUstream);

/* The compiler compares them with the signatures of both versions. */
static const PFN_cuMemcpyBatchAsync_v12080 batch_of_12_8 = standin_batch_of_12_8;
static const PFN_cuMemcpyBatchAsync_v13000 batch_of_13_0 = cuMemcpyBatchAsync;

/* xorshift64*, which is enough for delays and orders. */
uint64_t random_below(uint64_t bound) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (random_state * 0x2545F4914F6CDD1Dull >> 11) % bound;
}

/* Record a use that fails or corrupts memory on a real device. The fixture fails the test for it. */
void add_violation(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (violation_count < VIOLATIONS_MAX) vsnprintf(violations[violation_count], VIOLATION_BYTES, format, arguments);
    violation_count++;
    va_end(arguments);
}

/* The entry of a name as `cuda.h` has it, without `_v2`. */
static Call *call_of(const char *name) {
    size_t length = strcspn(name, "_");
    for (Call *call = calls; call < calls + NAMES_MAX; call++) {
        if (!call->name[0]) snprintf(call->name, sizeof call->name, "%.*s", (int)length, name);
        if (strlen(call->name) == length && !strncmp(call->name, name, length)) return call;
    }
    abort();
}

/* Count a call. Whether this one shall fail, and with which result. */
bool should_fail(const char *name, CUresult *result) {
    Call *call = call_of(name);
    call->calls++;
    bool now = call->fails_at && call->calls >= call->fails_at && call->calls < call->fails_until;
    if (is_spared) return false;
    if (!now && call->chance > 0.0) now = (double)random_below(1000000) / 1e6 < call->chance;
    if (!now) return false;
    *result = call->result;
    if (call->loses_device) {
        lost = call->result;
        pthread_cond_broadcast(&changed);
    }
    return true;
}

/* Begin a call: the lock is held then, unless the result is an error, which the call returns. */
CUresult enter(const char *function, int needs) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (should_fail(function, &result)) return leave(result);
    if (lost) return leave(lost);
    if ((needs & NEEDS_CONTEXT) && !current_context) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if ((needs & UNSAFE_IN_CAPTURES) && breaks_captures()) return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return CUDA_SUCCESS;
}

CUresult leave(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- the driver, the device, its context */

EXPORTED CUresult cuDriverGetVersion(int *version) {
    BEGIN(0);
    *version = settings.version;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuGetProcAddress(const char *symbol, void **address, int version, cuuint64_t flags,
                                   CUdriverProcAddressQueryResult *status) {
    const struct {
        const char *symbol;
        int since;
        void *address;
    } versions[] = {{"cuMemcpyBatchAsync", 13000, (void *)batch_of_13_0},
                    {"cuMemcpyBatchAsync", 12080, (void *)batch_of_12_8}};
    (void)flags;
    BEGIN(0);
    *address = NULL;
    if (status) *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (version > settings.version) return leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t index = 0; index < sizeof versions / sizeof *versions && !*address; index++) {
        if (strcmp(versions[index].symbol, symbol)) continue;
        if (status) *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (version < versions[index].since) continue;
        *address = versions[index].address;
        if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuGetErrorName(CUresult error, const char **name) {
#define NAMED(result) case result: *name = #result; return CUDA_SUCCESS
    switch (error) {
        NAMED(CUDA_SUCCESS);
        NAMED(CUDA_ERROR_INVALID_VALUE);
        NAMED(CUDA_ERROR_OUT_OF_MEMORY);
        NAMED(CUDA_ERROR_INVALID_DEVICE);
        NAMED(CUDA_ERROR_INVALID_CONTEXT);
        NAMED(CUDA_ERROR_INVALID_HANDLE);
        NAMED(CUDA_ERROR_ILLEGAL_STATE);
        NAMED(CUDA_ERROR_NOT_FOUND);
        NAMED(CUDA_ERROR_NOT_READY);
        NAMED(CUDA_ERROR_ILLEGAL_ADDRESS);
        NAMED(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        NAMED(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        NAMED(CUDA_ERROR_LAUNCH_FAILED);
        NAMED(CUDA_ERROR_NOT_PERMITTED);
        NAMED(CUDA_ERROR_NOT_SUPPORTED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        NAMED(CUDA_ERROR_CAPTURED_EVENT);
        NAMED(CUDA_ERROR_UNKNOWN);
    default:
        *name = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
#undef NAMED
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    BEGIN(0);
    if (device) return leave(CUDA_ERROR_INVALID_DEVICE);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        *value = settings.max_pitch;
        return leave(CUDA_SUCCESS);
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        *value = settings.can_use_host_pointers;
        return leave(CUDA_SUCCESS);
    default:
        add_violation("%s: attribute %d is unknown to the stand-in", __func__, (int)attribute);
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
}

EXPORTED CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
    BEGIN(0);
    if (device) return leave(CUDA_ERROR_INVALID_DEVICE);
    if (size < 13) return leave(CUDA_ERROR_INVALID_VALUE);
    strcpy(text, "0000:3B:00.0");
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    BEGIN(0);
    if (device) return leave(CUDA_ERROR_INVALID_DEVICE);
    *context = (CUcontext)&the_context;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext *context) {
    BEGIN(0);
    *context = current_context;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext context) {
    BEGIN(0);
    current_context = context;
    return leave(CUDA_SUCCESS);
}

/* ---- what a test sets and reads */

__attribute__((constructor)) static void set_up(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
}

/* As a process that has just begun: no streams, no registrations, no device memory but what was allocated. */
EXPORTED void standin_reset(uint64_t seed) {
    pthread_mutex_lock(&lock);
    life++;
    end_streams();
    forget_registrations();
    memset(calls, 0, sizeof calls);
    violation_count = 0;
    lost = CUDA_SUCCESS;
    random_state = seed * 2 + 1;
    pthread_mutex_unlock(&lock);
}

EXPORTED void standin_configure(Settings *wanted) {
    pthread_mutex_lock(&lock);
    settings = *wanted;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Calls of that name fail with that result, from the `nth` from now on, `times` of them. `piece` is the copying of one
   piece by a stream, which loses the device; `batch` is a batch of which a part is begun. */
EXPORTED void standin_fail(const char *name, uint64_t nth, uint64_t times, int result, int loses_device) {
    pthread_mutex_lock(&lock);
    Call *call = call_of(name);
    call->fails_at = call->calls + nth;
    call->fails_until = call->fails_at + times;
    call->result = (CUresult)result;
    call->loses_device = loses_device;
    pthread_mutex_unlock(&lock);
}

/* Each call of that name fails with that probability. */
EXPORTED void standin_fail_by_chance(const char *name, double chance, int result) {
    pthread_mutex_lock(&lock);
    Call *call = call_of(name);
    call->chance = chance;
    call->result = (CUresult)result;
    call->loses_device = false;
    pthread_mutex_unlock(&lock);
}

/* No call of this thread is made to fail. */
EXPORTED void standin_spare_thread(int spared) { is_spared = spared; }

/* How many calls of that name there were; of `piece`, how many pieces were copied. */
EXPORTED uint64_t standin_call_count(const char *name) {
    pthread_mutex_lock(&lock);
    uint64_t count = call_of(name)->calls;
    pthread_mutex_unlock(&lock);
    return count;
}

/* How many violations there are; the one of that index into `text`. */
EXPORTED uint64_t standin_violation(uint64_t index, char *text, size_t size) {
    pthread_mutex_lock(&lock);
    uint64_t count = violation_count;
    snprintf(text, size, "%s", index < count && index < VIOLATIONS_MAX ? violations[index] : "");
    pthread_mutex_unlock(&lock);
    return count;
}
