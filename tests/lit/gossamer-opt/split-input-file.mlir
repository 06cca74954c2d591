// Each part is a module of its own; a bad part costs its output and the exit status, not the other parts.
// RUN: not gossamer-opt %s --split-input-file -p canonicalize 2>%t.err | filecheck %s
// RUN: filecheck %s --check-prefix=ERR --input-file %t.err

// CHECK:     func.func @same_name()
// CHECK:     // -----
// CHECK-NOT: @bad
// CHECK:     func.func @same_name(%arg0: i32)
func.func @same_name() {
  return
}

// -----

// Positions are those of the whole file.
// ERR: split-input-file.mlir:[[# @LINE + 2]]:3: error: type of return operand 0 ('f32') doesn't match
func.func @bad(%a: f32) -> i32 {
  return %a : f32
}

// -----

func.func @same_name(%a: i32) {
  return
}
