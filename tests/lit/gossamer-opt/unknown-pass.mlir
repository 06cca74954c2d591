// What a pipeline cannot mean is said before anything runs, with what it may have meant; exit status 2.
// RUN: not gossamer-opt %s -p 'cse,shedule' 2>&1 | filecheck %s --check-prefix=TYPO
// RUN: not gossamer-opt %s -p 'schedule{bit=256}' 2>&1 | filecheck %s --check-prefix=OPTION
// RUN: not gossamer-opt %s -p 'cse,canonicalize{fast=1}' 2>&1 | filecheck %s --check-prefix=MLIR

// TYPO:   gossamer-opt: unknown pass 'shedule'; did you mean schedule? valid: {{.*}}choose-format, {{.*}}, and those of MLIR
// OPTION: gossamer-opt: pass 'schedule' has no option 'bit'; did you mean bits? valid: bits
// MLIR:   gossamer-opt: MLIR refuses 'canonicalize{fast=1}': {{.*}} no such option fast
func.func @f() {
  return
}
