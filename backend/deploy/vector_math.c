/* Implements the vector functions that Inductor's code expects in libtorch, element by element. */
#include <math.h>

#define OF_ONE(name, vector, lanes, target_, function)                            \
  HIDDEN __attribute__((target(target_))) vector name(vector x) {                 \
    for (int i = 0; i < lanes; i++) x[i] = function(x[i]);                        \
    return x;                                                                     \
  }
#define OF_TWO(name, vector, lanes, target_, function)                            \
  HIDDEN __attribute__((target(target_))) vector name(vector x, vector y) {       \
    for (int i = 0; i < lanes; i++) x[i] = function(x[i], y[i]);                  \
    return x;                                                                     \
  }
#define WIDTHS(kind, name, bound)                                                 \
  kind(Sleef_##name##f8##bound, floats8, 8, "avx2", name##f)                      \
  kind(Sleef_##name##f16##bound, floats16, 16, "avx512f", name##f)                \
  kind(Sleef_##name##d4##bound, doubles4, 4, "avx2", name)                        \
  kind(Sleef_##name##d8##bound, doubles8, 8, "avx512f", name)

typedef float floats8 __attribute__((vector_size(32)));
typedef float floats16 __attribute__((vector_size(64)));
typedef double doubles4 __attribute__((vector_size(32)));
typedef double doubles8 __attribute__((vector_size(64)));

WIDTHS(OF_ONE, exp, _u10) WIDTHS(OF_ONE, exp2, _u10) WIDTHS(OF_ONE, expm1, _u10)
WIDTHS(OF_ONE, log, _u10) WIDTHS(OF_ONE, log2, _u10) WIDTHS(OF_ONE, log10, _u10) WIDTHS(OF_ONE, log1p, _u10)
WIDTHS(OF_ONE, sin, _u10) WIDTHS(OF_ONE, cos, _u10) WIDTHS(OF_ONE, sin, _u35) WIDTHS(OF_ONE, cos, _u35)
WIDTHS(OF_ONE, tan, _u10) WIDTHS(OF_ONE, tanh, _u10) WIDTHS(OF_ONE, sinh, _u10) WIDTHS(OF_ONE, cosh, _u10)
WIDTHS(OF_ONE, asin, _u10) WIDTHS(OF_ONE, acos, _u10) WIDTHS(OF_ONE, atan, _u10)
WIDTHS(OF_ONE, asinh, _u10) WIDTHS(OF_ONE, acosh, _u10) WIDTHS(OF_ONE, atanh, _u10)
WIDTHS(OF_ONE, erf, _u10) WIDTHS(OF_ONE, erfc, _u15) WIDTHS(OF_ONE, lgamma, _u10)
WIDTHS(OF_TWO, pow, _u10) WIDTHS(OF_TWO, atan2, _u10) WIDTHS(OF_TWO, hypot, _u05) WIDTHS(OF_TWO, fmod, ) WIDTHS(OF_TWO, nextafter, )
WIDTHS(OF_TWO, copysign, )
