/* Starts a CUDA kernel: one call from Python for the context, the maps of the copy engine, memory that must be zero, and
   the launch. Nothing is shared between calls, so any thread may call. The driver is loaded before this file. */

#include <stdint.h>

enum { PLACES = 24, MAPS = 4, SWIZZLE_128 = 3, PROMOTE_256 = 3 };

typedef struct {
  _Alignas(64) uint64_t words[16];
} Map;

/* A matrix that the copy engine reads: so many rows and 64 columns at a time, swizzled. */
typedef struct {
  void *address;
  uint64_t height, width, stride; /* rows, numbers of a row, bytes from row to row */
  uint32_t kind, rows;            /* CUtensorMapDataType; rows copied at a time */
} Matrix;

typedef struct {
  uint64_t address;
  uint64_t words; /* of 32 bits */
} Zeroed;

typedef struct {
  void *function;
  uint32_t threads, shared, count;
  uint32_t places[PLACES]; /* where each argument lies among those of a call */
  char types[PLACES];      /* M: a Matrix; Z: a Zeroed; else a number or address as it is */
} Kernel;

int cuCtxGetCurrent(void **);
int cuCtxSetCurrent(void *);
int cuDeviceGet(int *, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuMemsetD32Async(uint64_t, unsigned, uint64_t, void *);
int cuTensorMapEncodeTiled(Map *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                           const uint32_t *, int, int, int, int);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static int encode(Map *map, const Matrix *matrix) {
  const uint64_t sizes[2] = {matrix->width, matrix->height}, strides[1] = {matrix->stride};
  const uint32_t box[2] = {64, matrix->rows}, steps[2] = {1, 1};
  return cuTensorMapEncodeTiled(map, matrix->kind, 2, matrix->address, sizes, strides, box, steps, 0, SWIZZLE_128,
                                PROMOTE_256, 0);
}

/* A thread has no context before it first uses the device through torch: autograd's may begin with a kernel of ours.
   It gets the one that torch uses. */
static int ensure_context(int device) {
  void *context = 0;
  int handle, code = cuCtxGetCurrent(&context);
  if (code || context) return code;
  if ((code = cuDeviceGet(&handle, device)) || (code = cuDevicePrimaryCtxRetain(&context, handle))) return code;
  return cuCtxSetCurrent(context);
}

/* Returns the driver's code: 0 if the kernel was started. */
int launch(const Kernel *kernel, int device, uint32_t programs, void *stream, const char *arguments) {
  Map maps[MAPS];
  void *addresses[PLACES];
  int code = ensure_context(device), map = 0;
  for (uint32_t i = 0; !code && i < kernel->count; i++) {
    const char *place = arguments + kernel->places[i];
    addresses[i] = (void *)place;
    if (kernel->types[i] == 'M') {
      addresses[i] = &maps[map];
      code = encode(&maps[map++], (const Matrix *)place);
    } else if (kernel->types[i] == 'Z') {
      const Zeroed *zeroed = (const Zeroed *)place;
      code = cuMemsetD32Async(zeroed->address, 0, zeroed->words, stream);
    }
  }
  if (code) return code;
  return cuLaunchKernel(kernel->function, programs, 1, 1, kernel->threads, 1, 1, kernel->shared, stream, addresses, 0);
}
