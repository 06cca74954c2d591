// Makes a package refuse a processor when it is loaded. AOTInductor asks for the device type when it makes a model; only an
// exception stops it. The linker makes it call the function below. Code that runs while the library is opened also asks. An
// exception would end the process there, so that code gets the type.
#include <stdexcept>

extern "C" {
int __real_aoti_torch_device_type_cpu(void);
const char *gossamer_refusal(void);

int __wrap_aoti_torch_device_type_cpu(void) {
  if (const char *why = gossamer_refusal()) throw std::runtime_error(why);
  return __real_aoti_torch_device_type_cpu();
}
}
