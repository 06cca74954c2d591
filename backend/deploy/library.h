/* MODEL, a model that gossamer.build made: a library that needs neither Python nor PyTorch.

     MODEL *model = MODEL_load();
     MODEL_tensor in[MODEL_INPUTS] = {{.data = x, .type = MODEL_FLOAT32, .rank = 2, .sizes = {3, 384}}}, out[MODEL_OUTPUTS];
     if (!model || MODEL_run(model, in, out)) puts(MODEL_error());
     MODEL_release(out);
     MODEL_free(model);

SIGNATURE */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MODEL_INPUTS = INPUT_COUNT, MODEL_OUTPUTS = OUTPUT_COUNT };

enum { MODEL_UINT8, MODEL_INT8, MODEL_INT16, MODEL_INT32, MODEL_INT64, MODEL_FLOAT16, MODEL_FLOAT32, MODEL_FLOAT64,
       MODEL_BOOL = 11, MODEL_BFLOAT16 = 15 };

/* Elements that lie one after the other, the last dimension innermost. `owner` is the library's. */
typedef struct { void *data; int type, rank; int64_t sizes[8]; void *owner; } MODEL_tensor;

typedef struct MODEL MODEL;

MODEL *MODEL_load(void);                                              /* NULL: see MODEL_error */
int MODEL_run(MODEL *, const MODEL_tensor *in, MODEL_tensor *out);    /* 0: `out` has results, until they are released */
void MODEL_release(MODEL_tensor *out);
void MODEL_free(MODEL *);
const char *MODEL_error(void);                                        /* why the last call of this thread failed */

#ifdef __cplusplus
}
#endif
