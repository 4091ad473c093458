/* Rows of tables in host memory and in files: reference.py says what must come out. Callers split the work; nothing here
 * starts threads.
 *
 * A row in memory is a miss to DRAM: rows that come soon are prefetched. A row in a file is a wait for the disk: of many
 * rows those that the kernel has in memory are taken at once, and it reads all others before the first is waited for. */
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
    const int64_t *starts; /* the first row of each table, and the number of rows of all */
    int64_t width;
} files;

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

static int64_t table_of(const files *f, int64_t table, int64_t row) {
    while (row >= f->starts[table + 1]) table++;
    return table;
}

/* Rows that are read or written at once: those at positions first..last, all of one table. */
typedef struct {
    int64_t first, last, table;
} run;

static off_t offset_of(const files *f, run r, const int64_t *rows) {
    return (off_t)((rows[r.first] - f->starts[r.table]) * bytes_of(f->width));
}

static int64_t length_of(const files *f, run r, const int64_t *rows) {
    return (rows[r.last - 1] - rows[r.first] + 1) * bytes_of(f->width);
}

/* The run that begins at a position: its rows lie at most `gap` bytes apart and fit into the buffer together. */
static run next_run(const files *f, const int64_t *rows, int64_t first, int64_t last, int64_t table, int64_t gap) {
    const int64_t bytes = bytes_of(f->width);
    run r = {first, first + 1, table_of(f, table, rows[first])};
    for (; r.last < last && rows[r.last] < f->starts[r.table + 1]; r.last++)
        if ((rows[r.last] - rows[r.last - 1] - 1) * bytes > gap || (rows[r.last] - rows[first] + 1) * bytes > BUFFER) break;
    return r;
}

/* Ask the kernel to read a run into its memory, without waiting for it. */
static void announce(const files *f, run r, const int64_t *rows) {
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(f->handles[r.table], offset_of(f, r, rows), (off_t)length_of(f, r, rows), POSIX_FADV_WILLNEED);
#else
    (void)f, (void)r, (void)rows;
#endif
}

/* Whether the run was in the kernel's memory, and is in the buffer now. */
static int read_at_once(const files *f, run r, const int64_t *rows, char *buffer) {
#ifdef RWF_NOWAIT
    const size_t length = (size_t)length_of(f, r, rows);
    struct iovec to = {buffer, length};
    return preadv2(f->handles[r.table], &to, 1, offset_of(f, r, rows), RWF_NOWAIT) == (ssize_t)length;
#else
    (void)f, (void)r, (void)rows, (void)buffer;
    return 0;
#endif
}

/* A failure within a run is one of the row at which it stopped, or, in a gap, of the row after it. */
static fault stopped(const files *f, run r, const int64_t *rows, int64_t done, int64_t kind, int64_t code) {
    int64_t at = r.first;
    while (at + 1 < r.last && (rows[at] - rows[r.first] + 1) * bytes_of(f->width) <= done) at++;
    return wrong(kind, rows[at], code);
}

static fault read_run(const files *f, run r, const int64_t *rows, char *buffer) {
    const int64_t length = length_of(f, r, rows);
    for (int64_t done = 0; done < length;) {
        const ssize_t count =
            pread(f->handles[r.table], buffer + done, (size_t)(length - done), offset_of(f, r, rows) + (off_t)done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return stopped(f, r, rows, done, count ? SYSTEM : SHORT, count ? errno : 0);
        done += count;
    }
    return wrong(FINE, 0, 0);
}

static fault write_run(const files *f, run r, const int64_t *rows, const char *buffer) {
    const int64_t length = length_of(f, r, rows);
    for (int64_t done = 0; done < length;) {
        const ssize_t count =
            pwrite(f->handles[r.table], buffer + done, (size_t)(length - done), offset_of(f, r, rows) + (off_t)done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return stopped(f, r, rows, done, SYSTEM, count ? errno : ENOSPC);
        done += count;
    }
    return wrong(FINE, 0, 0);
}

/* Check the records of a run in the buffer and copy their values out. */
static fault take(const files *f, run r, const int64_t *rows, const int64_t *order, const uint64_t *buffer, float *out) {
    const int64_t words = words_of(f->width);
    for (int64_t i = r.first; i < r.last; i++) {
        const uint64_t *record = buffer + (rows[i] - rows[r.first]) * (words + 2), head = (uint64_t)rows[i] + 1;
        if (record[0] != head) return wrong(record[0] ? OTHER_ROW : EMPTY, rows[i], 0);
        if (record[words + 1] != checksum(head, record + 1, words)) return wrong(DAMAGED, rows[i], 0);
        memcpy(out + (order ? order[i] : i) * f->width, record + 1, (size_t)f->width * sizeof(float));
    }
    return wrong(FINE, 0, 0);
}

static void put(const files *f, run r, const int64_t *rows, const int64_t *order, uint64_t *buffer, const float *values) {
    const int64_t words = words_of(f->width);
    for (int64_t i = r.first; i < r.last; i++) {
        uint64_t *record = buffer + (i - r.first) * (words + 2);
        record[0] = (uint64_t)rows[i] + 1;
        record[words] = 0;
        memcpy(record + 1, values + (order ? order[i] : i) * f->width, (size_t)f->width * sizeof(float));
        record[words + 1] = checksum(record[0], record + 1, words);
    }
}

static uint64_t *new_buffer(int64_t width) {
    const int64_t bytes = bytes_of(width);
    return malloc((size_t)(bytes > BUFFER ? bytes : BUFFER));
}

/* Read the rows at positions first..last, which never decrease, to their positions of `out`. */
fault read_records(const files *f, const int64_t *rows, const int64_t *order, float *out, int64_t first, int64_t last) {
    uint64_t *buffer = new_buffer(f->width);
    if (!buffer) return wrong(SYSTEM, rows[first], ENOMEM);
    fault result = wrong(FINE, 0, 0);
    run waiting[WAITING];
    for (int64_t at = first, table = 0; at < last && !result.kind;) {
        int64_t count = 0;
        while (at < last && count < WAITING && !result.kind) {
            const run r = next_run(f, rows, at, last, table, GAP);
            table = r.table, at = r.last;
            if (read_at_once(f, r, rows, (char *)buffer))
                result = take(f, r, rows, order, buffer, out);
            else
                announce(f, waiting[count++] = r, rows);
        }
        for (int64_t i = 0; i < count && !result.kind; i++) {
            result = read_run(f, waiting[i], rows, (char *)buffer);
            if (!result.kind) result = take(f, waiting[i], rows, order, buffer, out);
        }
    }
    free(buffer);
    return result;
}

/* Write the rows at positions first..last, ascending and distinct, with the values at their positions. A page that a run
 * covers in part is read before it is written: all are announced before the first is written, because writing holds a
 * lock of the file, under which the disk would be waited for. */
fault write_records(const files *f, const int64_t *rows, const int64_t *order, const float *values, int64_t first,
                    int64_t last) {
    uint64_t *buffer = new_buffer(f->width);
    if (!buffer) return wrong(SYSTEM, rows[first], ENOMEM);
    fault result = wrong(FINE, 0, 0);
    run waiting[WAITING];
    for (int64_t at = first, table = 0; at < last && !result.kind;) {
        int64_t count = 0;
        for (; at < last && count < WAITING; at = waiting[count++].last) {
            waiting[count] = next_run(f, rows, at, last, table, 0);
            table = waiting[count].table;
            announce(f, waiting[count], rows);
        }
        for (int64_t i = 0; i < count && !result.kind; i++) {
            put(f, waiting[i], rows, order, buffer, values);
            result = write_run(f, waiting[i], rows, (const char *)buffer);
        }
    }
    free(buffer);
    return result;
}

/* The error number of a failed write of the kernel to the disk since the last call; 0 if there was none. With `start`
 * all changed pages of the file begin to be written. */
int64_t written_back(int64_t handle, int64_t start) {
#ifdef SYNC_FILE_RANGE_WRITE
    if (start) sync_file_range((int)handle, 0, 0, SYNC_FILE_RANGE_WRITE);
    /* Waits for the first page at most, and reports failures of any. */
    if (sync_file_range((int)handle, 0, 1, SYNC_FILE_RANGE_WAIT_BEFORE) && (errno == EIO || errno == ENOSPC)) return errno;
#else
    (void)handle, (void)start;
#endif
    return 0;
}
