/* A CUDA driver without a card: what the files of this library share, and what a test sets and reads.

   The CUDA calls are those of NVIDIA's own `cuda.h`: the compiler compares every signature and structure with it. "Device
   memory" is ordinary memory that a test, or `cuMemAlloc`, names as such. A stream is a queue with a thread, and an event
   is a place in such a queue, so work runs beside the caller as it does on a card, and in any order that streams and
   events do not forbid.

   All state is behind one lock. A CUDA call takes it in `enter` and gives it back in `leave`. */

#ifndef STANDIN_H
#define STANDIN_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

/* What a call needs, and what it may do to a capture. */
enum { NEEDS_CONTEXT = 1, UNSAFE_IN_CAPTURES = 2 };

typedef struct {
    uint64_t target, source;
    size_t size;
    void *content; /* the source's bytes, where they were read ahead of the stream's order */
} Piece;

typedef struct Operation {
    struct Operation *next;
    enum { COPY, RECORD, WAIT } kind;
    Piece *pieces;
    size_t count;
    CUevent event;
    uint64_t turn; /* which of the event's records */
} Operation;

struct CUstream_st {
    struct CUstream_st *next;
    pthread_t thread;
    unsigned life; /* of which `standin_reset`: handles from before it are refused */
    Operation *first, *last;
    bool ending;
    bool captures, capture_is_broken;
    CUstreamCaptureMode capture_mode;
    pthread_t capture_thread;
};

struct CUevent_st {
    unsigned life;
    uint64_t recorded, reached;
    double reached_s;
    bool in_capture;
};

/* What a test sets, by the methods of `library.Libcuda`. */
typedef struct {
    int version;
    int can_use_host_pointers;
    int max_pitch;
    int copies_are_held;
    uint64_t page_bytes;
    double delay_min_s, delay_max_s;
} Settings;

extern Settings settings;
extern pthread_mutex_t lock;
extern pthread_cond_t changed;
extern CUresult lost; /* the result of every call, once the device is lost */
extern unsigned life;
extern struct CUstream_st *streams;

/* The first line of a call: the lock is held behind it, and `leave` is the only way out. */
#define BEGIN(needs)                            \
    CUresult result = enter(__func__, (needs)); \
    if (result) return result

CUresult enter(const char *function, int needs);
CUresult leave(CUresult result);
bool should_fail(const char *name, CUresult *result);
void add_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t random_below(uint64_t bound);
double now_s(void);

CUstream stream_of(CUstream handle);
CUresult enqueue(CUstream stream, Operation operation);
void end_streams(void);
bool breaks_captures(void);

bool copy_piece(Piece *piece);
void read_piece(Piece *piece);
void forget_registrations(void);

#endif
