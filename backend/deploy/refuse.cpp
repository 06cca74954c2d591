// A package refuses a processor when it is loaded: AOTInductor asks for the type of the device when it makes a model, and an
// exception is the only answer that ends this. The linker has it ask here. Code that runs while the library is opened asks, too,
// and would take the process with it, so that it gets the type.
#include <stdexcept>

extern "C" {
int __real_aoti_torch_device_type_cpu(void);
const char *gossamer_refusal(void);

int __wrap_aoti_torch_device_type_cpu(void) {
  if (const char *why = gossamer_refusal()) throw std::runtime_error(why);
  return __real_aoti_torch_device_type_cpu();
}
}
