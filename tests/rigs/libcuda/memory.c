/* Device memory, page-locked memory, and copies between them. See standin.h. */

#include "standin.h"

#include <stdlib.h>
#include <string.h>

typedef enum { NOWHERE, DEVICE, ALLOCATED_HOST, REGISTERED_HOST } Kind;

static const char *const KIND_NAMES[] = {"memory that is neither", "device memory", "host memory", "host memory"};

typedef struct Range {
    struct Range *next;
    Kind kind;
    uint64_t start, end;
    bool owned; /* allocated here */
} Range;

static Range *ranges;

static Range *range_at(uint64_t start, Kind kind) {
    for (Range *range = ranges; range; range = range->next)
        if (range->start == start && range->kind == kind) return range;
    return NULL;
}

static void add_range(Kind kind, uint64_t start, size_t size, bool owned) {
    Range *range = malloc(sizeof *range);
    *range = (Range){ranges, kind, start, start + size, owned};
    ranges = range;
}

static void drop_range(Range *dropped) {
    Range **link = &ranges;
    while (*link != dropped) link = &(*link)->next;
    *link = dropped->next;
    if (dropped->owned) free((void *)dropped->start);
    free(dropped);
}

/* The kind of the one allocation or registration that holds all these bytes. */
static Kind kind_of(uint64_t address, size_t size) {
    for (Range *range = ranges; range; range = range->next)
        if (range->start <= address && address + size <= range->end) return range->kind;
    return NOWHERE;
}

/* Count ordinary memory, such as a CPU tensor's, as one device allocation. */
EXPORTED void standin_add_device_memory(uint64_t start, size_t size) {
    pthread_mutex_lock(&lock);
    if (!range_at(start, DEVICE)) add_range(DEVICE, start, size, false);
    pthread_mutex_unlock(&lock);
}

/* Give memory of `cuMemAlloc` or `cuMemHostAlloc` back, or forget device memory; no CUDA call, for finalizers. */
EXPORTED void standin_release_memory(uint64_t start) {
    pthread_mutex_lock(&lock);
    Range *range = range_at(start, DEVICE);
    if (!range) range = range_at(start, ALLOCATED_HOST);
    if (range) drop_range(range);
    pthread_mutex_unlock(&lock);
}

/* Bytes that are registered now. */
EXPORTED uint64_t standin_registered_bytes(void) {
    uint64_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (Range *range = ranges; range; range = range->next)
        if (range->kind == REGISTERED_HOST) bytes += range->end - range->start;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Memory that is allocated stays until it is given back, whatever is reset: tensors may lie on it. */
void forget_registrations(void) {
    for (Range *range = ranges, *next; range; range = next) {
        next = range->next;
        if (!range->owned) drop_range(range);
    }
}

static CUresult allocate(Kind kind, size_t size, int filling, uint64_t *start) {
    void *memory = NULL;
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    if (posix_memalign(&memory, 4096, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, filling, size); /* what must not be taken for KV */
    add_range(kind, (uint64_t)memory, size, true);
    *start = (uint64_t)memory;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAlloc(CUdeviceptr *start, size_t size) {
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    uint64_t made = 0;
    result = allocate(DEVICE, size, 0xDD, &made);
    *start = made;
    return leave(result);
}

EXPORTED CUresult cuMemHostAlloc(void **start, size_t size, unsigned int flags) {
    (void)flags;
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    uint64_t made = 0;
    result = allocate(ALLOCATED_HOST, size, 0xEE, &made);
    *start = (void *)made;
    return leave(result);
}

EXPORTED CUresult cuMemHostRegister(void *start, size_t size, unsigned int flags) {
    (void)flags;
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    uint64_t page = settings.page_bytes, first = (uint64_t)start, end = first + size;
    if (!start || !size) return leave(CUDA_ERROR_INVALID_VALUE);
    uint64_t first_page = first / page, end_page = (end + page - 1) / page;
    for (Range *range = ranges; range; range = range->next) {
        if (range->kind != REGISTERED_HOST && range->kind != ALLOCATED_HOST) continue;
        if (range->start / page < end_page && first_page < (range->end + page - 1) / page)
            return leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    add_range(REGISTERED_HOST, first, size, false);
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemHostUnregister(void *start) {
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    Range *range = range_at((uint64_t)start, REGISTERED_HOST);
    if (!range) return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    drop_range(range);
    return leave(CUDA_SUCCESS);
}

/* Whether both ends can be reached now; a violation if not. */
static bool is_reachable(const char *when, const Piece *piece) {
    Kind target = kind_of(piece->target, piece->size), source = kind_of(piece->source, piece->size);
    bool one_is_device = target == DEVICE || source == DEVICE;
    if (target != NOWHERE && (source != NOWHERE || piece->content) && (one_is_device || piece->content)) return true;
    add_violation("%s: %zu bytes from %s to %s", when, piece->size, KIND_NAMES[source], KIND_NAMES[target]);
    return false;
}

/* Keep the source's bytes as they are now. */
void read_piece(Piece *piece) {
    piece->content = malloc(piece->size);
    memcpy(piece->content, (const void *)piece->source, piece->size);
}

/* Again at the time of the copy: what was freed or unregistered by then must not be touched any more. */
bool copy_piece(Piece *piece) {
    if (!is_reachable("while copying", piece)) return false;
    memmove((void *)piece->target, piece->content ? piece->content : (void *)piece->source, piece->size);
    return true;
}

static CUresult begin_copy(const char *function, CUstream handle, Piece *pieces, size_t count) {
    CUstream stream = stream_of(handle);
    CUresult result = stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    for (size_t index = 0; !result && index < count; index++)
        if (!is_reachable(function, &pieces[index])) result = CUDA_ERROR_INVALID_VALUE;
    if (!result) return enqueue(stream, (Operation){.kind = COPY, .pieces = pieces, .count = count});
    free(pieces);
    return result;
}

EXPORTED CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream handle) {
    BEGIN(NEEDS_CONTEXT);
    Piece *piece = malloc(sizeof *piece);
    *piece = (Piece){target, source, size, NULL};
    return leave(begin_copy(__func__, handle, piece, 1));
}

static uint64_t place_2d(CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch) {
    return (type == CU_MEMORYTYPE_HOST ? (uint64_t)host : (uint64_t)device) + y * pitch + x;
}

EXPORTED CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *copy, CUstream handle) {
    BEGIN(NEEDS_CONTEXT);
    size_t width = copy->WidthInBytes, rows = copy->Height, limit = (size_t)settings.max_pitch;
    bool arrays = copy->srcMemoryType == CU_MEMORYTYPE_ARRAY || copy->dstMemoryType == CU_MEMORYTYPE_ARRAY;
    if (arrays || !width || !rows || copy->srcPitch < width || copy->dstPitch < width || copy->srcPitch > limit ||
        copy->dstPitch > limit)
        return leave(CUDA_ERROR_INVALID_VALUE);
    Piece whole = {
        .target = place_2d(copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstXInBytes, copy->dstY,
                           copy->dstPitch),
        .source = place_2d(copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcXInBytes, copy->srcY,
                           copy->srcPitch),
    };
    /* The driver looks up where the whole copy lies: it must not cross allocations, even between rows. */
    if (kind_of(whole.target, (rows - 1) * copy->dstPitch + width) == NOWHERE ||
        kind_of(whole.source, (rows - 1) * copy->srcPitch + width) == NOWHERE) {
        add_violation("%s: %zu rows of %zu bytes reach beyond one allocation", __func__, rows, width);
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    Piece *pieces = malloc(rows * sizeof *pieces);
    for (size_t row = 0; row < rows; row++)
        pieces[row] = (Piece){whole.target + row * copy->dstPitch, whole.source + row * copy->srcPitch, width, NULL};
    return leave(begin_copy(__func__, handle, pieces, rows));
}

/* A batch that is made to fail has begun a part of its pieces: `cuda.h` does not exclude it. */
static CUresult fail_batch(CUstream handle, Piece *pieces, size_t count, CUresult result) {
    size_t begun = random_below(count + 1);
    if (begun) begin_copy("cuMemcpyBatchAsync", handle, pieces, begun);
    else free(pieces);
    return result;
}

static CUresult begin_batch(const char *function, CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes,
                            size_t count, CUmemcpyAttributes *attributes, size_t *first_of, size_t attribute_count,
                            CUstream handle) {
    CUresult failure = CUDA_SUCCESS, result = enter(function, NEEDS_CONTEXT);
    if (result) return result;
    if (!handle || !count || !attribute_count || attribute_count > count || first_of[0])
        return leave(CUDA_ERROR_INVALID_VALUE);
    Piece *pieces = calloc(count, sizeof *pieces);
    size_t entry = 0;
    for (size_t index = 0; index < count; index++) {
        while (entry + 1 < attribute_count && first_of[entry + 1] <= index) entry++;
        int order = (int)attributes[entry].srcAccessOrder;
        Piece *piece = &pieces[index];
        *piece = (Piece){targets[index], sources[index], sizes[index], NULL};
        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            failure = CUDA_ERROR_INVALID_VALUE;
        Kind target = kind_of(piece->target, piece->size), source = kind_of(piece->source, piece->size);
        bool by_host_pointer = target == REGISTERED_HOST || source == REGISTERED_HOST;
        if (by_host_pointer && !settings.can_use_host_pointers) {
            add_violation("%s: a registered host address where the device cannot use it", function);
            failure = CUDA_ERROR_INVALID_VALUE;
        }
        if (source == NOWHERE) continue; /* `begin_copy` records it */
        if (order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL ||
            (order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY && random_below(2)))
            read_piece(piece);
    }
    if (failure) {
        for (size_t index = 0; index < count; index++) free(pieces[index].content);
        free(pieces);
        return leave(failure);
    }
    if (should_fail("batch", &failure)) return leave(fail_batch(handle, pieces, count, failure));
    return leave(begin_copy(function, handle, pieces, count));
}

EXPORTED CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                                     CUmemcpyAttributes *attributes, size_t *first_of, size_t attribute_count,
                                     CUstream stream) {
    return begin_batch("cuMemcpyBatchAsync", targets, sources, sizes, count, attributes, first_of, attribute_count,
                       stream);
}

/* The signature of 12.8, which `cuda.h` of 13 declares for the driver's own sources alone. */
CUresult standin_batch_of_12_8(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *first_of, size_t attribute_count,
                               size_t *failed_at, CUstream stream) {
    CUresult result = begin_batch("cuMemcpyBatchAsync", targets, sources, sizes, count, attributes, first_of,
                                  attribute_count, stream);
    if (result && failed_at) *failed_at = SIZE_MAX; /* an error of no piece in particular */
    return result;
}
