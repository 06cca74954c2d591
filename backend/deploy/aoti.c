/* Implements gossamer::exported for code of AOTInductor, with tensors of torch's stable C interface. */
typedef struct array *Tensor;
extern int aoti_torch_get_data_ptr(Tensor, void **);
extern int aoti_torch_get_dim(Tensor, int64_t *);
extern int aoti_torch_get_sizes(Tensor, int64_t **);
extern int aoti_torch_is_contiguous(Tensor, _Bool *);
extern int aoti_torch_copy_(Tensor, Tensor, int);
extern int aoti_torch_get_dtype(Tensor, int *);
extern int aoti_torch_delete_tensor_object(Tensor);
extern int aoti_torch_device_type_cpu(void);
extern int aoti_torch_empty_strided(int64_t, const int64_t *, const int64_t *, int, int, int, Tensor *);

static int new_tensor(struct tensor *made) {
  int64_t strides[RANK], stride = 1;
  for (int64_t d = made->rank - 1; d >= 0; d--) strides[d] = stride, stride *= made->sizes[d];
  int cpu = aoti_torch_device_type_cpu();
  if (aoti_torch_empty_strided(made->rank, made->sizes, strides, (int)made->type, cpu, 0, &made->handle)) return 1;
  return aoti_torch_get_data_ptr(made->handle, (void **)&made->data);
}

static int new_tensors(struct tensor *results, int count) {
  for (int i = 0; i < count; i++)
    if (new_tensor(results + i)) return 1;
  return 0;
}

/* Describes a tensor for kernels. Copies a tensor that is not contiguous; the copy has a handle, which the caller deletes. */
static int seen(Tensor given, struct tensor *found) {
  int64_t *sizes;
  _Bool in_order;
  if (aoti_torch_get_dim(given, &found->rank) || found->rank > RANK || aoti_torch_get_sizes(given, &sizes)) return 1;
  memcpy(found->sizes, sizes, found->rank * sizeof *sizes);
  if (aoti_torch_is_contiguous(given, &in_order)) return 1;
  if (in_order) return aoti_torch_get_data_ptr(given, (void **)&found->data);
  int type;
  if (aoti_torch_get_dtype(given, &type)) return 1;
  found->type = type;
  return new_tensor(found) || aoti_torch_copy_(found->handle, given, 0);
}

/* A library that registers destructors of thread-local objects is never unloaded. So the linker makes Inductor's code call this
   function instead, which registers nothing. Its only such object is the text of a thread's last error, which is then lost. */
HIDDEN int __wrap___cxa_thread_atexit(void (*destroy)(void *), void *object, void *library) { return 0; }

/* Returns why this processor cannot run the model; NULL if it can, and while the library is being opened. */
HIDDEN const char *gossamer_refusal(void) { return looked && refused() ? refusal : NULL; }

HIDDEN int aoti_torch_cpu_exported(const Tensor *operands, int64_t count, const char *key, ...) {
  const struct region *region = REGIONS;
  while (region->key && strcmp(region->key, key)) region++;
  if (refused()) return fprintf(stderr, "gossamer: %s\n", refusal), 1; /* reached if torch's loader asks for no device */
  if (!region->key || region->operands != count) return 1;
  struct tensor in[count], out[region->results];
  memset(in, 0, sizeof in), memset(out, 0, sizeof out);
  int failed = 0;
  for (int64_t i = 0; i < count && !failed; i++) failed = seen(operands[i], in + i);
  failed = failed || region->run(in, out, new_tensors);
  for (int64_t i = 0; i < count; i++)
    if (in[i].handle) aoti_torch_delete_tensor_object(in[i].handle);
  va_list places;
  va_start(places, key);
  for (int i = 0; i < region->results; i++) {
    Tensor *place = va_arg(places, Tensor *);
    if (place && !failed)
      *place = out[i].handle;
    else if (out[i].handle)
      aoti_torch_delete_tensor_object(out[i].handle);
  }
  va_end(places);
  return failed;
}
