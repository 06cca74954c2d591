// A parse error ends in exit status 1 and is printed with file, line, column and the line of the input; nothing is written.
// RUN: not gossamer-opt %s -o %t 2>&1 | filecheck %s
// RUN: not gossamer-opt < %s 2>&1 | filecheck %s --check-prefix=STDIN

// CHECK:      parse-error.mlir:[[# @LINE + 5]]:19: error: use of undeclared SSA value name
// CHECK-NEXT:   %0 = arith.addf %b, %a : f32
// CHECK-NEXT:                   ^
// STDIN:      <stdin>:[[# @LINE + 2]]:19: error:
func.func @f(%a: f32) -> f32 {
  %0 = arith.addf %b, %a : f32
  return %0 : f32
}
