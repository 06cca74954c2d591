/* Implements tensors for code of AOTInductor without libtorch: the part of its C interface that needs none of its kernels. */
struct storage {
  char *memory;
  int64_t references, bytes;
  int owned;
};

struct array {
  struct storage *storage;
  int64_t offset, rank, sizes[RANK], strides[RANK];
  int type, constant; /* the model owns a constant: AOTInductor takes handles of it, and does not delete them */
};

static const int BYTES[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 2}; /* of an element, by torch's number for its type */

static char *address(Tensor tensor) { return tensor->storage->memory + tensor->offset * BYTES[tensor->type]; }

static int made(char *memory, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int type, Tensor *found) {
  if (rank > RANK || type < 0 || type >= (int)sizeof BYTES / (int)sizeof *BYTES) return 1;
  Tensor tensor = malloc(sizeof *tensor);
  struct storage *storage = malloc(sizeof *storage);
  if (!tensor || !storage) return free(tensor), free(storage), 1;
  int64_t last = 0, empty = 0;
  for (int64_t d = 0; d < rank; d++) {
    tensor->sizes[d] = sizes[d], tensor->strides[d] = strides[d];
    last += (sizes[d] - 1) * strides[d], empty |= !sizes[d];
  }
  tensor->storage = storage, tensor->offset = offset, tensor->rank = rank, tensor->type = type, tensor->constant = 0;
  storage->references = 1, storage->bytes = empty ? 0 : (offset + last + 1) * BYTES[type];
  storage->owned = !memory;
  storage->memory = memory ? memory : aligned_alloc(64, storage->bytes / 64 * 64 + 64);
  if (!storage->memory) return free(tensor), free(storage), 1;
  *found = tensor;
  return 0;
}

HIDDEN int aoti_torch_delete_tensor_object(Tensor tensor) {
  if (!tensor || tensor->constant) return 0;
  if (__atomic_sub_fetch(&tensor->storage->references, 1, __ATOMIC_ACQ_REL) == 0) {
    if (tensor->storage->owned) free(tensor->storage->memory);
    free(tensor->storage);
  }
  free(tensor);
  return 0;
}

HIDDEN int aoti_torch_empty_strided(
    int64_t rank, const int64_t *sizes, const int64_t *strides, int type, int device, int index, Tensor *found) {
  return made(NULL, rank, sizes, strides, 0, type, found);
}

HIDDEN int aoti_torch_create_tensor_from_blob(
    void *memory, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int type, int device, int index,
    Tensor *found) {
  return made(memory, rank, sizes, strides, offset, type, found);
}

HIDDEN int aoti_torch_create_tensor_from_blob_v2(
    void *memory, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int type, int device, int index,
    Tensor *found, int layout, const uint8_t *more, int64_t bytes) {
  return made(memory, rank, sizes, strides, offset, type, found);
}

static int view(Tensor tensor, Tensor *found) {
  if (!(*found = malloc(sizeof **found))) return 1;
  **found = *tensor, (*found)->constant = 0;
  __atomic_add_fetch(&tensor->storage->references, 1, __ATOMIC_RELAXED);
  return 0;
}

HIDDEN int aoti_torch_new_tensor_handle(Tensor tensor, Tensor *found) {
  return tensor->constant ? (*found = tensor, 0) : view(tensor, found);
}

HIDDEN int aoti_torch__reinterpret_tensor(
    Tensor tensor, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t more, Tensor *found) {
  if (rank > RANK || view(tensor, found)) return 1;
  (*found)->rank = rank, (*found)->offset = tensor->offset + more;
  for (int64_t d = 0; d < rank; d++) (*found)->sizes[d] = sizes[d], (*found)->strides[d] = strides[d];
  return 0;
}

HIDDEN int aoti_torch_get_data_ptr(Tensor tensor, void **found) { return *found = address(tensor), 0; }
HIDDEN int aoti_torch_get_dim(Tensor tensor, int64_t *found) { return *found = tensor->rank, 0; }
HIDDEN int aoti_torch_get_sizes(Tensor tensor, int64_t **found) { return *found = tensor->sizes, 0; }
HIDDEN int aoti_torch_get_strides(Tensor tensor, int64_t **found) { return *found = tensor->strides, 0; }
HIDDEN int aoti_torch_get_size(Tensor tensor, int64_t d, int64_t *found) { return *found = tensor->sizes[d], 0; }
HIDDEN int aoti_torch_get_stride(Tensor tensor, int64_t d, int64_t *found) { return *found = tensor->strides[d], 0; }
HIDDEN int aoti_torch_get_dtype(Tensor tensor, int *found) { return *found = tensor->type, 0; }
HIDDEN int aoti_torch_get_storage_offset(Tensor tensor, int64_t *found) { return *found = tensor->offset, 0; }
HIDDEN int aoti_torch_get_storage_size(Tensor tensor, int64_t *found) { return *found = tensor->storage->bytes, 0; }
HIDDEN int aoti_torch_get_device_type(Tensor tensor, int *found) { return *found = 0, 0; }
HIDDEN int aoti_torch_get_device_index(Tensor tensor, int *found) { return *found = 0, 0; }
HIDDEN int aoti_torch_is_defined(Tensor tensor, _Bool *found) { return *found = 1, 0; } /* torch 2.14 asks */

HIDDEN int aoti_torch_get_numel(Tensor tensor, int64_t *found) {
  *found = 1;
  for (int64_t d = 0; d < tensor->rank; d++) *found *= tensor->sizes[d];
  return 0;
}

HIDDEN int aoti_torch_is_contiguous(Tensor tensor, _Bool *found) {
  int64_t stride = 1, numel;
  aoti_torch_get_numel(tensor, &numel);
  *found = 1;
  for (int64_t d = tensor->rank - 1; d >= 0 && numel; stride *= tensor->sizes[d--])
    if (tensor->sizes[d] != 1 && tensor->strides[d] != stride) *found = 0;
  return 0;
}

static void copy(char *to, char *from, Tensor target, Tensor source, int64_t d) {
  int bytes = BYTES[source->type];
  if (d == source->rank) {
    memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < source->sizes[d]; i++)
    copy(to + i * target->strides[d] * bytes, from + i * source->strides[d] * bytes, target, source, d + 1);
}

HIDDEN int aoti_torch_copy_(Tensor target, Tensor source, int unused) {
  int same = target->type == source->type && target->rank == source->rank;
  for (int64_t d = 0; same && d < source->rank; d++) same = target->sizes[d] == source->sizes[d];
  if (same) copy(address(target), address(source), target, source, 0);
  return !same;
}

HIDDEN int aoti_torch_clone(Tensor source, Tensor *found) {
  int64_t strides[RANK], stride = 1;
  for (int64_t d = source->rank - 1; d >= 0; d--) strides[d] = stride, stride *= source->sizes[d];
  return made(NULL, source->rank, source->sizes, strides, 0, source->type, found) || aoti_torch_copy_(*found, source, 0);
}

HIDDEN void aoti_torch_check(_Bool holds, const char *function, const char *file, uint32_t line, const char *message) {
  if (holds) return;
  fprintf(stderr, "gossamer: %s\n", message);
  abort(); /* the code may run in a parallel loop, which nothing else can leave */
}

HIDDEN int aoti_torch_device_type_cpu(void) { return 0; }
HIDDEN int aoti_torch_device_type_cuda(void) { return 1; }
HIDDEN int aoti_torch_layout_strided(void) { return 0; }
HIDDEN _Bool aoti_torch_grad_mode_is_enabled(void) { return 0; }
HIDDEN void aoti_torch_grad_mode_set_enabled(_Bool enabled) {}
HIDDEN int aoti_torch_dtype_uint8(void) { return 0; }
HIDDEN int aoti_torch_dtype_int8(void) { return 1; }
HIDDEN int aoti_torch_dtype_int16(void) { return 2; }
HIDDEN int aoti_torch_dtype_int32(void) { return 3; }
HIDDEN int aoti_torch_dtype_int64(void) { return 4; }
HIDDEN int aoti_torch_dtype_float16(void) { return 5; }
HIDDEN int aoti_torch_dtype_float32(void) { return 6; }
HIDDEN int aoti_torch_dtype_float64(void) { return 7; }
HIDDEN int aoti_torch_dtype_bool(void) { return 11; }
HIDDEN int aoti_torch_dtype_bfloat16(void) { return 15; }
