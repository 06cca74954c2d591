/* Implements the functions of library.h with the code that AOTInductor compiles. */
struct pair {
  const char *name;
  Tensor tensor;
};
extern int AOTInductorModelContainerCreateWithDevice(void **, size_t, const char *, const char *);
extern int AOTInductorModelContainerDelete(void *);
extern int AOTInductorModelContainerRun(void *, Tensor *, size_t, Tensor *, size_t, void *, void *);
extern int AOTInductorModelContainerGetNumConstants(void *, size_t *);
extern int AOTInductorModelContainerGetConstantName(void *, size_t, const char **);
extern int AOTInductorModelContainerGetConstantOriginalFQN(void *, size_t, const char **);
extern int AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void *, const struct pair *, size_t, _Bool, _Bool);

#define PUBLIC __attribute__((visibility("default")))

struct constant {
  const char *name;
  const void *data;
  int type;
  int64_t rank, sizes[RANK], strides[RANK];
};

static const struct constant CONSTANTS[];
static const char *problem(const MODEL_tensor *in); /* returns why the model cannot take these inputs, or NULL */

struct MODEL {
  void *container;
  size_t count;
  struct pair *constants;
};

/* Threads of OpenMP wait in OpenMP's library until the process ends. So that library stays loaded if a program closes this one. */
__attribute__((constructor)) static void keep_openmp(void) {
  Dl_info found;
  if (dladdr((void *)omp_get_max_threads, &found)) dlopen(found.dli_fname, RTLD_NOW | RTLD_NODELETE);
}

static _Thread_local char error[512];

PUBLIC const char *MODEL_error(void) { return error; }

static int failed(const char *format, const char *what) { return snprintf(error, sizeof error, format, what), 1; }

PUBLIC void MODEL_free(MODEL *model) {
  if (!model) return;
  if (model->container) AOTInductorModelContainerDelete(model->container);
  for (size_t i = 0; i < model->count; i++) {
    Tensor tensor = model->constants[i].tensor;
    tensor->constant = 0;
    aoti_torch_delete_tensor_object(tensor);
  }
  free(model->constants);
  free(model);
}

static int fill(MODEL *model) {
  size_t count;
  if (AOTInductorModelContainerCreateWithDevice(&model->container, 1, "cpu", NULL)) return failed("%s", "the model cannot be made");
  if (AOTInductorModelContainerGetNumConstants(model->container, &count)) return 1;
  model->constants = calloc(count + 1, sizeof *model->constants);
  for (; model->count < count; model->count++) {
    const char *name, *original;
    struct pair *pair = model->constants + model->count;
    if (AOTInductorModelContainerGetConstantName(model->container, model->count, &name)) return 1;
    if (AOTInductorModelContainerGetConstantOriginalFQN(model->container, model->count, &original)) return 1;
    const struct constant *found = CONSTANTS;
    while (found->name && strcmp(found->name, original) && strcmp(found->name, name)) found++;
    if (!found->name) return failed("the library has no constant %s", original && *original ? original : name);
    pair->name = name;
    if (made((char *)found->data, found->rank, found->sizes, found->strides, 0, found->type, &pair->tensor)) return 1;
    pair->tensor->constant = 1;
  }
  void *container = model->container;
  return AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(container, model->constants, count, 0, 1);
}

PUBLIC MODEL *MODEL_load(void) {
  if (refused()) return failed("%s", refusal), NULL;
  MODEL *model = calloc(1, sizeof *model);
  *error = 0;
  if (!model || fill(model)) {
    if (!*error) failed("%s", "there is no memory, or AOTInductor refuses the model's constants");
    MODEL_free(model);
    return NULL;
  }
  return model;
}

/* Gives each result its own handle. AOTInductor gives the same one twice for a tensor that the model returns twice. */
static int apart(Tensor *found) {
  int failures = 0;
  for (int i = 0; i < MODEL_OUTPUTS; i++)
    for (int j = 0; j < i; j++)
      if (found[i] && found[i] == found[j] && !found[i]->constant) failures += view(found[j], found + i);
  return failures;
}

PUBLIC int MODEL_run(MODEL *model, const MODEL_tensor *in, MODEL_tensor *out) {
  Tensor given[MODEL_INPUTS + 1] = {0}, found[MODEL_OUTPUTS + 1] = {0};
  const char *why = problem(in);
  if (why) return failed("%s", why);
  for (int i = 0; i < MODEL_INPUTS; i++) {
    int64_t strides[RANK], stride = 1;
    for (int d = in[i].rank - 1; d >= 0; d--) strides[d] = stride, stride *= in[i].sizes[d];
    if (made(in[i].data ? in[i].data : "", in[i].rank, in[i].sizes, strides, 0, in[i].type, given + i)) {
      while (i--) aoti_torch_delete_tensor_object(given[i]);
      return failed("%s", "there is no memory for the inputs");
    }
  }
  if (AOTInductorModelContainerRun(model->container, given, MODEL_INPUTS, found, MODEL_OUTPUTS, NULL, NULL))
    return failed("%s", "the model failed; standard error says why");
  int failures = apart(found);
  for (int i = 0; i < MODEL_OUTPUTS && !failures; i++) {
    _Bool in_order;
    aoti_torch_is_contiguous(found[i], &in_order);
    if (!in_order || found[i]->constant) {
      Tensor ordered;
      if ((failures = aoti_torch_clone(found[i], &ordered))) break;
      aoti_torch_delete_tensor_object(found[i]);
      found[i] = ordered;
    }
    out[i] = (MODEL_tensor){address(found[i]), found[i]->type, (int)found[i]->rank, {0}, found[i]};
    memcpy(out[i].sizes, found[i]->sizes, found[i]->rank * sizeof(int64_t));
  }
  for (int i = 0; i < MODEL_OUTPUTS && failures; i++) aoti_torch_delete_tensor_object(found[i]);
  return failures ? failed("%s", "there is no memory for the results") : 0;
}

PUBLIC void MODEL_release(MODEL_tensor *out) {
  for (int i = 0; i < MODEL_OUTPUTS; i++) aoti_torch_delete_tensor_object(out[i].owner), out[i].owner = NULL;
}
