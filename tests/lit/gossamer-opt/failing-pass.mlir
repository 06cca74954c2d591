// A failing pass is named after its diagnostics; no result is printed.
// RUN: not gossamer-opt %s -p 'cse,transform-interpreter,canonicalize' >%t 2>%t.err
// RUN: test ! -s %t
// RUN: filecheck %s --input-file %t.err

// CHECK:      failing-pass.mlir:[[# @LINE + 10]]:21: error: only ops implementing TilingInterface are supported
// CHECK-NEXT:     %tiled, %loop = transform.structured.tile_using_for
// CHECK-NEXT:                     ^
// CHECK-NEXT: failing-pass.mlir:[[# @LINE + 11]]:3: note: target op
// CHECK-NEXT:   func.func @f() {
// CHECK-NEXT:   ^
// CHECK-NEXT: gossamer-opt: pass 'transform-interpreter' failed
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%root: !transform.any_op {transform.readonly}) {
    %functions = transform.structured.match ops{["func.func"]} in %root : (!transform.any_op) -> !transform.any_op
    %tiled, %loop = transform.structured.tile_using_for %functions tile_sizes [4]
      : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
  func.func @f() {
    return
  }
}
