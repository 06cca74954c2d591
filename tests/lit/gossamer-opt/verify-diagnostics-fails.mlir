// A diagnostic that was not expected, one that is expected at the wrong line or with other words, and one that is not an
// error but a note: each is reported at its place.
// RUN: not gossamer-opt %s --split-input-file --verify-diagnostics -o %t 2>&1 | filecheck %s

// CHECK: verify-diagnostics-fails.mlir:[[# @LINE + 2]]:3: error: unexpected error: type of return operand 0
func.func @nothing_said(%a: f32) -> i32 {
  return %a : f32
}

// -----

// CHECK: verify-diagnostics-fails.mlir:[[# @LINE + 4]]:3: error: unexpected error: type of return operand 0
// CHECK: verify-diagnostics-fails.mlir:[[# @LINE + 2]]:1: error: expected error 'type of return operand' did not come
func.func @wrong_line(%a: f32) -> i32 {
  // expected-error @+2 {{type of return operand}}
  return %a : f32
}

// -----

// CHECK: verify-diagnostics-fails.mlir:[[# @LINE + 2]]:1: error: unexpected note: see existing symbol
// CHECK: verify-diagnostics-fails.mlir:[[# @LINE + 2]]:1: error: expected warning 'redefinition' did not come
func.func private @twice()
// expected-warning @below {{redefinition}}
func.func private @twice() // expected-error {{redefinition}}
