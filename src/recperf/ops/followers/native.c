/* What follows items in sequences: reference.py says what must come out. Callers split the rows; nothing here starts
 * threads.
 *
 * A row has a sum for every item, of which few are not 0: their columns are listed as they come and sorted at the end.
 * The sums are added in the order of reference.py, so that both have the same bits. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FINE, NO_MEMORY, OUTSIDE, DIGIT = 8, VALUES = 1 << DIGIT };

typedef struct {
    const int32_t *items;  /* of each event, from 1 on */
    const uint8_t *after;  /* events of the same sequence after each one */
    const int32_t *events; /* places of the events that are followed, by row */
    const int64_t *begins, *ends; /* of each row in `events` */
    const double *weights;        /* by distance from 1 on */
    const int64_t *places;        /* where the entries of each row begin in the output */
    int64_t distances, count, all, followed; /* items of the catalogue, events of all, entries of `events` */
} call;

/* Sorts by digits of 8 bits; `other` has room for as many. The result is in `columns`. */
static void sort(uint32_t *columns, uint32_t *other, int64_t length, uint32_t most) {
    for (int shift = 0; shift < 32 && most >> shift; shift += DIGIT) {
        int64_t starts[VALUES + 1] = {0};
        for (int64_t i = 0; i < length; i++) starts[(columns[i] >> shift) % VALUES + 1]++;
        for (int value = 0; value < VALUES; value++) starts[value + 1] += starts[value];
        for (int64_t i = 0; i < length; i++) other[starts[(columns[i] >> shift) % VALUES]++] = columns[i];
        memcpy(columns, other, (size_t)length * sizeof *columns);
    }
}

/* Rows first..last: their columns, ascending, their sums and how many there are. */
int followers_count(const call *c, int64_t first, int64_t last, int32_t *columns, double *sums, int64_t *lengths) {
    double *row = calloc((size_t)c->count, sizeof *row);
    uint32_t *listed = malloc(2 * (size_t)c->count * sizeof *listed), *spare = listed + c->count;
    int failure = row && listed ? FINE : NO_MEMORY;
    for (int64_t r = first; r < last && !failure; r++) {
        int64_t length = 0;
        if (c->begins[r] < 0 || c->ends[r] > c->followed) failure = OUTSIDE;
        for (int64_t distance = 1; distance <= c->distances && !failure; distance++) {
            const double weight = c->weights[distance - 1];
            for (int64_t p = c->begins[r]; p < c->ends[r]; p++) {
                const int64_t event = c->events[p], next = event + distance;
                const int inside = event >= 0 && event < c->all;
                if (inside && c->after[event] < distance) continue;
                const int64_t column = inside && next < c->all ? (int64_t)c->items[next] - 1 : -1;
                if (column < 0 || column >= c->count) {
                    failure = OUTSIDE;
                    break;
                }
                if (row[column] == 0) listed[length++] = (uint32_t)column;
                row[column] += weight;
            }
        }
        sort(listed, spare, length, (uint32_t)c->count);
        for (int64_t i = 0; i < length; i++) {
            columns[c->places[r] + i] = (int32_t)listed[i];
            sums[c->places[r] + i] = row[listed[i]];
            row[listed[i]] = 0;
        }
        lengths[r] = length;
    }
    free(row);
    free(listed);
    return failure;
}

/* The sums of the rows of the items of each history, times the weights of their places; 0 is no item. Returns the first
 * place of an item that is outside, or whose row is, and -1 where there is none. */
int64_t followers_add(const int64_t *offsets, const int32_t *columns, const float *values, const int64_t *history,
                      const float *weights, int64_t length, int64_t count, int64_t entries, int64_t first, int64_t last,
                      float *sums) {
    for (int64_t b = first; b < last; b++) {
        float *row = sums + b * count;
        memset(row, 0, (size_t)count * sizeof *row);
        for (int64_t l = 0; l < length; l++) {
            const int64_t item = history[b * length + l];
            if (item < 0 || item > count) return b * length + l;
            if (!item) continue;
            if (offsets[item - 1] < 0 || offsets[item] > entries) return b * length + l;
            for (int64_t e = offsets[item - 1]; e < offsets[item]; e++) {
                if ((uint64_t)columns[e] >= (uint64_t)count) return b * length + l;
                row[columns[e]] += values[e] * weights[l];
            }
        }
    }
    return -1;
}
