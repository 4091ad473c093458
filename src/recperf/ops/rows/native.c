/* Rows of tables in host memory and in files: reference.py says what must come out. Callers split the work; nothing
 * here starts threads.
 *
 * A row in memory is a miss to DRAM: rows that come soon are prefetched. A row in a file is a wait for the disk: rows
 * that the kernel has in memory are taken at once, and it is asked for many others before the first is waited for. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LINE = 64, BUFFER = 1 << 18, GAP = 4096, WAITING = 128 };
enum { FINE, SYSTEM, SHORT, EMPTY, OTHER_ROW, DAMAGED };

typedef struct {
    const int32_t *handles;
    const int64_t *starts; /* the first place of each file, and the number of places of all */
    const int64_t *rows, *places;
    const int64_t *order; /* the positions of rows and places, by ascending place */
    int64_t width;
} call;

typedef struct {
    int64_t kind, row, code;
} fault;

static void prefetch(const float *row, int64_t width) {
    const char *begin = (const char *)row, *end = (const char *)(row + width);
    for (; begin < end; begin += LINE) __builtin_prefetch(begin, 0, 3);
}

/* out[i] = table[rows[i]] for i in first..last; the rows are checked before. */
void gather(const float *table, const int64_t *rows, float *out, int64_t first, int64_t last, int64_t width,
            int64_t ahead) {
    for (int64_t i = first; i < last; i++) {
        if (i + ahead < last) prefetch(table + rows[i + ahead] * width, width);
        memcpy(out + i * width, table + rows[i] * width, (size_t)width * sizeof(float));
    }
}

/* table[rows[i]] = values[i] for i in first..last. Whole lines are written, which needs no prefetching. */
void scatter(float *table, const int64_t *rows, const float *values, int64_t first, int64_t last, int64_t width) {
    for (int64_t i = first; i < last; i++)
        memcpy(table + rows[i] * width, values + i * width, (size_t)width * sizeof(float));
}

static uint64_t mixed(uint64_t sum, uint64_t word) {
    const uint64_t product = (sum ^ word) * 0xD6E8FEB86659FD93u;
    return product ^ product >> 32;
}

static uint64_t checksum(uint64_t head, const uint64_t *words, int64_t count) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t a = head + golden, b = head + 2 * golden, c = head + 3 * golden, d = head + 4 * golden;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        a = mixed(a, words[i]), b = mixed(b, words[i + 1]);
        c = mixed(c, words[i + 2]), d = mixed(d, words[i + 3]);
    }
    if (i < count) a = mixed(a, words[i]);
    if (i + 1 < count) b = mixed(b, words[i + 1]);
    if (i + 2 < count) c = mixed(c, words[i + 2]);
    uint64_t word = mixed(mixed(mixed(mixed(head, a), b), c), d);
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

static int64_t words_of(int64_t width) { return (width + 1) / 2; }
static int64_t bytes_of(int64_t width) { return 8 * (2 + words_of(width)); }

static fault wrong(int64_t kind, int64_t row, int64_t code) { return (fault){kind, row, code}; }

/* Records that lie in one file and are read or written at once: those at first..last of the order. */
typedef struct {
    int64_t first, last, file;
} run;

static int64_t place(const call *c, int64_t i) { return c->places[c->order[i]]; }
static int64_t row(const call *c, int64_t i) { return c->rows[c->order[i]]; }

static off_t offset_of(const call *c, run r) {
    return (off_t)((place(c, r.first) - c->starts[r.file]) * bytes_of(c->width));
}

static int64_t length_of(const call *c, run r) {
    return (place(c, r.last - 1) - place(c, r.first) + 1) * bytes_of(c->width);
}

/* The run that begins at `first`: its records lie at most `gap` bytes apart and fit into the buffer together. */
static run next_run(const call *c, int64_t first, int64_t last, int64_t file, int64_t gap) {
    const int64_t bytes = bytes_of(c->width), begin = place(c, first);
    while (begin >= c->starts[file + 1]) file++;
    run r = {first, first + 1, file};
    for (int64_t before = begin; r.last < last; r.last++) {
        const int64_t next = place(c, r.last);
        if (next >= c->starts[file + 1]) break;
        if ((next - before - 1) * bytes > gap || (next - begin + 1) * bytes > BUFFER) break;
        before = next;
    }
    return r;
}

/* Ask the kernel to read a run into its memory, without waiting for it. */
static void announce(const call *c, run r) {
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(c->handles[r.file], offset_of(c, r), (off_t)length_of(c, r), POSIX_FADV_WILLNEED);
#else
    (void)c, (void)r;
#endif
}

/* Whether the run was in the kernel's memory, and is in the buffer now. */
static int read_at_once(const call *c, run r, char *buffer) {
#ifdef RWF_NOWAIT
    const size_t length = (size_t)length_of(c, r);
    struct iovec to = {buffer, length};
    return preadv2(c->handles[r.file], &to, 1, offset_of(c, r), RWF_NOWAIT) == (ssize_t)length;
#else
    (void)c, (void)r, (void)buffer;
    return 0;
#endif
}

/* A failure within a run is one of the record at which it stopped, or, in a gap, of the record after it. */
static fault stopped(const call *c, run r, int64_t done, int64_t kind, int64_t code) {
    int64_t at = r.first;
    while (at + 1 < r.last && (place(c, at) - place(c, r.first) + 1) * bytes_of(c->width) <= done) at++;
    return wrong(kind, row(c, at), code);
}

static fault move_run(const call *c, run r, char *buffer, int writing) {
    const int64_t length = length_of(c, r);
    for (int64_t done = 0; done < length;) {
        const int handle = c->handles[r.file];
        const size_t left = (size_t)(length - done);
        const off_t at = offset_of(c, r) + (off_t)done;
        char *part = buffer + done;
        const ssize_t count = writing ? pwrite(handle, part, left, at) : pread(handle, part, left, at);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return stopped(c, r, done, SYSTEM, errno);
        if (count == 0) return stopped(c, r, done, writing ? SYSTEM : SHORT, ENOSPC);
        done += count;
    }
    return wrong(FINE, 0, 0);
}

/* Check the records of a run in the buffer and copy their values out. */
static fault take(const call *c, run r, const uint64_t *buffer, float *out) {
    const int64_t words = words_of(c->width), begin = place(c, r.first);
    for (int64_t i = r.first; i < r.last; i++) {
        const uint64_t *record = buffer + (place(c, i) - begin) * (words + 2), head = (uint64_t)row(c, i) + 1;
        if (record[0] != head) return wrong(record[0] ? OTHER_ROW : EMPTY, row(c, i), 0);
        if (record[words + 1] != checksum(head, record + 1, words)) return wrong(DAMAGED, row(c, i), 0);
        memcpy(out + c->order[i] * c->width, record + 1, (size_t)c->width * sizeof(float));
    }
    return wrong(FINE, 0, 0);
}

static void put(const call *c, run r, uint64_t *buffer, const float *values) {
    const int64_t words = words_of(c->width);
    for (int64_t i = r.first; i < r.last; i++) {
        uint64_t *record = buffer + (i - r.first) * (words + 2);
        record[0] = (uint64_t)row(c, i) + 1;
        record[words] = 0;
        memcpy(record + 1, values + c->order[i] * c->width, (size_t)c->width * sizeof(float));
        record[words + 1] = checksum(record[0], record + 1, words);
    }
}

static uint64_t *new_buffer(int64_t width) {
    const int64_t bytes = bytes_of(width);
    return malloc((size_t)(bytes > BUFFER ? bytes : BUFFER));
}

/* Read the records at first..last of the order to their positions of `out`. */
fault read_records(const call *c, float *out, int64_t first, int64_t last) {
    uint64_t *buffer = new_buffer(c->width);
    if (!buffer) return wrong(SYSTEM, row(c, first), ENOMEM);
    fault result = wrong(FINE, 0, 0);
    run announced[WAITING];
    int64_t asked = 0, done = 0;
    for (int64_t at = first, file = 0; !result.kind && (at < last || done < asked);) {
        if (at < last && asked - done < WAITING) {
            const run r = next_run(c, at, last, file, GAP);
            file = r.file, at = r.last;
            if (read_at_once(c, r, (char *)buffer))
                result = take(c, r, buffer, out);
            else
                announce(c, announced[asked++ % WAITING] = r);
            continue;
        }
        const run r = announced[done++ % WAITING];
        result = move_run(c, r, (char *)buffer, 0);
        if (!result.kind) result = take(c, r, buffer, out);
    }
    free(buffer);
    return result;
}

/* Write the records at first..last of the order, whose places are distinct. A page that a run covers in part is read
 * before it is written: it is announced long before, because writing holds a lock of the file, under which it would
 * wait for the disk. */
fault write_records(const call *c, const float *values, int64_t first, int64_t last) {
    uint64_t *buffer = new_buffer(c->width);
    if (!buffer) return wrong(SYSTEM, row(c, first), ENOMEM);
    fault result = wrong(FINE, 0, 0);
    run announced[WAITING];
    int64_t asked = 0, done = 0;
    for (int64_t at = first, file = 0; !result.kind && (at < last || done < asked);) {
        if (at < last && asked - done < WAITING) {
            const run r = announced[asked++ % WAITING] = next_run(c, at, last, file, 0);
            file = r.file, at = r.last;
            announce(c, r);
            continue;
        }
        const run r = announced[done++ % WAITING];
        put(c, r, buffer, values);
        result = move_run(c, r, (char *)buffer, 1);
    }
    free(buffer);
    return result;
}

/* The error number of a write that the kernel could not bring to the disk since the last call; 0 if there was none. */
int64_t lost_write(int64_t handle) {
#ifdef SYNC_FILE_RANGE_WAIT_BEFORE
    /* Waits for the first page at most, and reports failures of any. */
    const int failed = sync_file_range((int)handle, 0, 1, SYNC_FILE_RANGE_WAIT_BEFORE);
    if (failed && (errno == EIO || errno == ENOSPC)) return errno;
#else
    (void)handle;
#endif
    return 0;
}
