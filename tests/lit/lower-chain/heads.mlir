// What stands around attention in some models: heads that are turned by the positions of their tokens, and rows that come
// position by position.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' --split-input-file | filecheck %s

// Heads are turned in the tile, those of the keys a phase before attention reads them; cosines and sines are packed like any
// other matrix.
// CHECK-LABEL: func.func private @rotated_rotate_tile4(
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK:             arith.subf
// CHECK:             vector.fma
// CHECK:           scf.for
// CHECK-LABEL: func.func @rotated(
// CHECK:           scf.parallel
// CHECK-COUNT-3:     call @rotated_pack
// CHECK:             call @rotated_rotate_tile4
// CHECK:             call @rotated_rotate
// CHECK:           scf.parallel
// CHECK:             call @rotated_attend_tile4
// CHECK:             call @rotated_unpack_tile4
func.func @rotated(
    %x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %cos: tensor<?x2xf32>, %sin: tensor<?x2xf32>, %length: index
) -> tensor<?x8xf32> {
  %q = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %r = "kernel.rotate"(%q, %cos, %sin) {heads = 2 : i64, head_size = 4 : i64, rotated = 2 : i64, offset = 0 : i64}
    : (tensor<?x8xf32>, tensor<?x2xf32>, tensor<?x2xf32>) -> tensor<?x8xf32>
  %k = "kernel.rotate"(%x, %cos, %sin) {heads = 1 : i64, head_size = 4 : i64, rotated = 2 : i64, offset = 4 : i64}
    : (tensor<?x8xf32>, tensor<?x2xf32>, tensor<?x2xf32>) -> tensor<?x4xf32>
  %y = "kernel.attend"(%r, %k, %k, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 1 : i64, head_size = 4 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x8xf32>, tensor<?x4xf32>, tensor<?x4xf32>, index) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// Tiles are of one sequence all the same: packing and unpacking step over the tokens of the others.
// CHECK-LABEL: func.func private @strided_pack_tile4(
// CHECK-SAME:    %[[STEP:[a-z0-9]+]]: index) {
// CHECK:         arith.muli %{{.*}}, %[[STEP]]
// CHECK-LABEL: func.func private @strided_unpack_tile4(
// CHECK-SAME:    %[[STEP:[a-z0-9]+]]: index) {
// CHECK:         arith.muli %{{.*}}, %[[STEP]]
// CHECK-LABEL: func.func @strided(
// CHECK-NOT:     kernel.regroup
func.func @strided(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %length: index) -> tensor<?x8xf32> {
  %g = "kernel.regroup"(%x, %length) {inverse = false} : (tensor<?x8xf32>, index) -> tensor<?x8xf32>
  %q = "kernel.spmm"(%g, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.attend"(%q, %q, %q, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 2 : i64, head_size = 4 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, index) -> tensor<?x8xf32>
  %o = "kernel.regroup"(%y, %length) {inverse = true} : (tensor<?x8xf32>, index) -> tensor<?x8xf32>
  return %o : tensor<?x8xf32>
}
