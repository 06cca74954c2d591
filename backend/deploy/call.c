/* Calls kernels in a package: provides scratch memory, and tests whether this processor can run them. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RANK 8
#define HIDDEN __attribute__((visibility("hidden")))

struct tensor {
  char *data;
  struct array *handle;
  int64_t type, rank, sizes[RANK];
};

/* Allocates results whose sizes and types are set. Returns nonzero if there is no memory. */
typedef int (*allocator)(struct tensor *results, int count);

struct region {
  const char *key;
  int operands, results;
  int (*run)(const struct tensor *in, struct tensor *out, allocator allocate);
};

struct feature {
  const char *name;
  unsigned leaf, subleaf, word, bit, state;
};

extern int omp_get_max_threads(void);

/* Scratch memory of earlier calls, for reuse. The first word of each block has the number of its bytes. */
static char *kept[64];

static char *scratch(int64_t bytes) {
  for (int i = 0; i < 64; i++) {
    char *found = __atomic_exchange_n(&kept[i], NULL, __ATOMIC_ACQUIRE);
    if (found && *(int64_t *)found >= bytes) return found;
    free(found);
  }
  char *made = aligned_alloc(64, 64 + (bytes + 63) / 64 * 64);
  if (made) *(int64_t *)made = bytes;
  return made;
}

static void keep(char *memory) {
  for (int i = 0; i < 64; i++) {
    char *none = NULL;
    if (__atomic_compare_exchange_n(&kept[i], &none, memory, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
  }
  free(memory);
}

__attribute__((destructor)) static void forget(void) {
  for (int i = 0; i < 64; i++) free(kept[i]);
}

/* Calls a kernel. Sets its last three words: scratch memory, its bytes, and the number of threads. */
static int call(void (*kernel)(int64_t *), int64_t *words, int count, int64_t each, int64_t shared) {
  int64_t threads = omp_get_max_threads(), bytes = each * threads + shared;
  char *memory = scratch(bytes);
  if (!memory) return 1;
  words[count - 3] = (int64_t)(memory + 64), words[count - 2] = bytes, words[count - 1] = threads;
  kernel(words);
  keep(memory);
  return 0;
}

static int lacks(const struct feature *feature) {
  unsigned words[4] = {0}, low = 0, high = 0;
  if (!__get_cpuid_count(1, 0, words, words + 1, words + 2, words + 3) || !(words[2] >> 27 & 1)) return 1;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* the registers that the system saves */
  if ((low & feature->state) != feature->state) return 1;
  if (!__get_cpuid_count(feature->leaf, feature->subleaf, words, words + 1, words + 2, words + 3)) return 1;
  if (!(words[feature->word] >> feature->bit & 1)) return 1;
  return feature->state >> 18 && syscall(SYS_arch_prctl, 0x1023, 18); /* asks Linux for the tile registers */
}

static const struct region REGIONS[];
static const struct feature FEATURES[];
static const char BUILT_FOR[];

static int looked, lacking; /* whether the library has been opened, and how many features this processor lacks */

__attribute__((constructor)) static void look(void) {
  for (const struct feature *each = FEATURES; each->name; each++) lacking += lacks(each);
  looked = 1;
}

static char refusal[1024];

static int refused(void) {
  if (!lacking) return 0;
  int at = snprintf(refusal, sizeof refusal, "this model was exported for %s, and this processor lacks", BUILT_FOR);
  for (const struct feature *each = FEATURES; each->name; each++)
    if (lacks(each)) at += snprintf(refusal + at, sizeof refusal - at, " %s", each->name);
  snprintf(refusal + at, sizeof refusal - at, ": export it on a machine like this one");
  return 1;
}
