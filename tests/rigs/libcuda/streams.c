/* Streams, events and captures. See standin.h. */

#include "standin.h"

#include <stdlib.h>
#include <time.h>

struct CUstream_st *streams;
static struct CUstream_st *default_stream;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Wait for a change until that time. The condition's clock is the monotonic one (`set_up` makes it so). */
static void wait_until(double until_s) {
    struct timespec until = {(time_t)until_s, (long)((until_s - (double)(time_t)until_s) * 1e9)};
    pthread_cond_timedwait(&changed, &lock, &until);
}

/* Copy the pieces one by one, in any order, spread over the delay that this copy gets. */
static void run_copy(CUstream stream, Operation *copy) {
    uint64_t range_us = (uint64_t)((settings.delay_max_s - settings.delay_min_s) * 1e6);
    double delay_s = settings.delay_min_s + (range_us ? (double)random_below(range_us + 1) / 1e6 : 0.0);
    double began_s = now_s();
    for (size_t left = copy->count; left && !stream->ending && !lost;) {
        double due_s = began_s + delay_s * (double)(copy->count - left + 1) / (double)copy->count;
        bool held = settings.copies_are_held && left <= (copy->count + 1) / 2;
        if (held) {
            pthread_cond_wait(&changed, &lock);
        } else if (due_s - now_s() > 0.0002) {
            wait_until(due_s);
        } else {
            size_t chosen = random_below(left);
            Piece piece = copy->pieces[chosen];
            copy->pieces[chosen] = copy->pieces[--left];
            copy->pieces[left] = piece;
            CUresult result;
            if (should_fail("piece", &result) || !copy_piece(&piece)) {
                if (!lost) lost = CUDA_ERROR_ILLEGAL_ADDRESS;
                pthread_cond_broadcast(&changed);
            }
        }
    }
    for (size_t index = 0; index < copy->count; index++) free(copy->pieces[index].content);
    free(copy->pieces);
}

static void run_operation(CUstream stream, Operation *operation) {
    CUevent event = operation->event;
    switch (operation->kind) {
    case COPY:
        run_copy(stream, operation);
        break;
    case RECORD:
        if (operation->turn > event->reached) {
            event->reached = operation->turn;
            event->reached_s = now_s();
        }
        break;
    case WAIT:
        while (event->reached < operation->turn && !stream->ending && !lost) pthread_cond_wait(&changed, &lock);
        break;
    }
}

static void *serve_stream(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&lock);
    while (!stream->ending) {
        Operation *operation = stream->first;
        if (!operation) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        run_operation(stream, operation);
        stream->first = operation->next; /* only now: a queue that is empty has nothing under way */
        if (!stream->first) stream->last = NULL;
        free(operation);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static CUresult make_stream(CUstream *made) {
    CUstream stream = calloc(1, sizeof *stream);
    stream->life = life;
    stream->next = streams;
    if (pthread_create(&stream->thread, NULL, serve_stream, stream)) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = streams = stream;
    return CUDA_SUCCESS;
}

/* The stream of a handle, the default one of NULL; NULL for a handle from before the last reset. */
CUstream stream_of(CUstream handle) {
    if (!handle) {
        if (!default_stream && make_stream(&default_stream)) return NULL;
        return default_stream;
    }
    return handle->life == life ? handle : NULL;
}

/* Put work into a stream; while the stream captures, the work goes into a graph that is never launched. */
CUresult enqueue(CUstream stream, Operation operation) {
    if (stream->captures) {
        for (size_t index = 0; index < operation.count; index++) free(operation.pieces[index].content);
        free(operation.pieces);
        return CUDA_SUCCESS;
    }
    Operation *last = malloc(sizeof *last);
    *last = operation;
    last->next = NULL;
    if (stream->last) stream->last->next = last;
    else stream->first = last;
    stream->last = last;
    pthread_cond_broadcast(&changed);
    return CUDA_SUCCESS;
}

/* End all threads; what they have not done is dropped. The lock is held, but not while they end. */
void end_streams(void) {
    for (CUstream stream = streams; stream; stream = stream->next) stream->ending = true;
    pthread_cond_broadcast(&changed);
    CUstream ended = streams;
    streams = default_stream = NULL;
    pthread_mutex_unlock(&lock);
    for (; ended; ended = ended->next) pthread_join(ended->thread, NULL);
    pthread_mutex_lock(&lock);
}

/* Whether a call that may be unsafe is forbidden to the calling thread; captures that it disturbs are broken then. By
   the documentation of `cuThreadExchangeStreamCaptureMode`. */
bool breaks_captures(void) {
    bool breaks = false;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    for (CUstream stream = streams; stream; stream = stream->next) {
        if (!stream->captures || stream->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        bool own = pthread_equal(stream->capture_thread, pthread_self());
        bool global = stream->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (own || (global && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) breaks = stream->capture_is_broken = true;
    }
    return breaks;
}

EXPORTED CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    BEGIN(0);
    CUstreamCaptureMode before = thread_mode;
    if ((unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return leave(CUDA_ERROR_INVALID_VALUE);
    thread_mode = *mode;
    *mode = before;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    BEGIN(NEEDS_CONTEXT);
    CUstream stream = handle ? stream_of(handle) : NULL; /* the default stream cannot be captured */
    if (!stream || stream->captures) return leave(CUDA_ERROR_INVALID_VALUE);
    stream->captures = true;
    stream->capture_is_broken = false;
    stream->capture_mode = mode;
    stream->capture_thread = pthread_self();
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    BEGIN(NEEDS_CONTEXT);
    CUstream stream = stream_of(handle);
    *graph = NULL;
    if (!stream || !stream->captures) return leave(CUDA_ERROR_ILLEGAL_STATE);
    stream->captures = false;
    return leave(stream->capture_is_broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
}

EXPORTED CUresult cuStreamCreateWithPriority(CUstream *made, unsigned int flags, int priority) {
    (void)flags, (void)priority;
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    return leave(make_stream(made));
}

EXPORTED CUresult cuStreamSynchronize(CUstream handle) {
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    CUstream stream = stream_of(handle);
    if (!stream) return leave(CUDA_ERROR_INVALID_HANDLE);
    while (stream->first && !stream->ending && !lost) pthread_cond_wait(&changed, &lock);
    return leave(lost);
}

EXPORTED CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
    (void)flags;
    BEGIN(NEEDS_CONTEXT);
    CUstream stream = stream_of(handle);
    if (!stream || event->life != life) return leave(CUDA_ERROR_INVALID_HANDLE);
    if (event->in_capture != stream->captures) {
        /* Outside in: the event is not part of the graph. Inside out: the stream would become part of the capture. */
        stream->capture_is_broken |= stream->captures;
        if (!stream->captures) add_violation("%s: a stream is drawn into a capture", __func__);
        return leave(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    return leave(enqueue(stream, (Operation){.kind = WAIT, .event = event, .turn = event->recorded}));
}

EXPORTED CUresult cuEventCreate(CUevent *made, unsigned int flags) {
    (void)flags;
    BEGIN(NEEDS_CONTEXT);
    *made = calloc(1, sizeof **made); /* kept until the process ends: a stream, or a stale handle, may name it */
    (*made)->life = life;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuEventRecord(CUevent event, CUstream handle) {
    BEGIN(NEEDS_CONTEXT);
    CUstream stream = stream_of(handle);
    if (!stream || event->life != life) return leave(CUDA_ERROR_INVALID_HANDLE);
    event->in_capture = stream->captures;
    if (!stream->captures) event->recorded++;
    return leave(enqueue(stream, (Operation){.kind = RECORD, .event = event, .turn = event->recorded}));
}

/* An event that was recorded in a capture is never reached: asking for it breaks the capture in any mode. */
static CUresult refuse_captured(CUevent event) {
    if (event->life != life) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->in_capture) return CUDA_SUCCESS;
    for (CUstream stream = streams; stream; stream = stream->next) stream->capture_is_broken |= stream->captures;
    return CUDA_ERROR_CAPTURED_EVENT;
}

EXPORTED CUresult cuEventQuery(CUevent event) {
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    if ((result = refuse_captured(event))) return leave(result);
    return leave(event->reached >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

EXPORTED CUresult cuEventSynchronize(CUevent event) {
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    if ((result = refuse_captured(event))) return leave(result);
    uint64_t turn = event->recorded;
    while (event->reached < turn && event->life == life && !lost) pthread_cond_wait(&changed, &lock);
    return leave(event->life == life ? lost : CUDA_ERROR_INVALID_HANDLE);
}

EXPORTED CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end) {
    BEGIN(NEEDS_CONTEXT | UNSAFE_IN_CAPTURES);
    if (begin->life != life || end->life != life || !begin->recorded || !end->recorded)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (begin->reached < begin->recorded || end->reached < end->recorded) return leave(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((end->reached_s - begin->reached_s) * 1e3);
    return leave(CUDA_SUCCESS);
}
