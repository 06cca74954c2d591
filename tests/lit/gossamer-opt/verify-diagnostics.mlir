// Every diagnostic that comes is announced by a comment: the run passes without a word.
// RUN: gossamer-opt %s --split-input-file --verify-diagnostics -p transform-interpreter > %t 2> %t.err
// RUN: test ! -s %t.err

module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%root: !transform.any_op {transform.readonly}) {
    %sums = transform.structured.match ops{["arith.addf"]} in %root : (!transform.any_op) -> !transform.any_op
    transform.debug.emit_remark_at %sums, "this is a sum" : !transform.any_op
    %functions = transform.structured.match ops{["func.func"]} in %root : (!transform.any_op) -> !transform.any_op
    // expected-error @+1 {{only ops implementing TilingInterface are supported}}
    %tiled, %loop = transform.structured.tile_using_for %functions tile_sizes [4]
      : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
  // expected-note @below {{target op}}
  func.func @f(%a: f32) -> f32 {
    %0 = arith.addf %a, %a : f32 // expected-remark {{this is a sum}}
    %1 = arith.addf %0, %a : f32
    // expected-remark @-1 {{is a sum}}
    %2 = arith.addf %1, %a : f32
    // expected-remark @above {{this is}}
    return %2 : f32
  }
}

// -----

// expected-note @below {{see existing symbol definition here}}
func.func private @twice()
// expected-error @below {{redefinition of symbol named 'twice'}}
func.func private @twice()

// -----

// expected-error @below {{expected '('}}
func.func private @unfinished
