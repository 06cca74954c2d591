// A chain of two products and what stands between them.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' --split-input-file | filecheck %s

// With a tile for each thread, one parallel loop does all stages tile by tile, in this thread's scratch memory; the two products
// differ in their operands only and share a function. With fewer tiles each stage is a loop of its own, rows shared out.
// CHECK:       kernel.tile_workspace = [4, 0, 0]
// CHECK-LABEL: func.func private @twice_pack_tile4(
// CHECK:         vector.maskedload
// CHECK:       func.func private @twice_product_tile4(
// CHECK:         vector.fma
// CHECK:         arith.negf
// CHECK:       func.func private @twice_unpack_tile4(
// CHECK:         vector.maskedstore
// CHECK-NOT:   @twice_product1
// CHECK-LABEL: func.func @twice(
// CHECK:         scf.if
// CHECK:           scf.parallel
// CHECK:             call @twice_pack_tile4
// CHECK:             call @twice_product_tile4
// CHECK:             call @twice_product_tile4
// CHECK:             call @twice_unpack_tile4
// CHECK:         } else {
// CHECK:           scf.parallel
// CHECK:             call @twice_pack_tile4
// CHECK:           scf.parallel
// CHECK:             call @twice_product_tile4
// CHECK:           scf.parallel
// CHECK:             call @twice_product_tile4
// CHECK:           scf.parallel
// CHECK:             call @twice_unpack_tile4
func.func @twice(%x: tensor<?x8xf32>, %v: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    %0 = arith.negf %sum : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.negf %sum : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// Attention reads keys and values of all tiles of a sequence: it starts a phase, and what crosses phases has memory of its own
// for each tile. 8 rows of 4 tokens are 128 bytes; each thread has scratch memory for the scores of its queries.
// CHECK:       kernel.tile_workspace = [4, 256, 128]
// CHECK-LABEL: func.func private @attention_attend_tile4(
// CHECK:         %[[BOUNDED:.*]] = math.tanh
// CHECK:         arith.mulf %[[BOUNDED]]
// CHECK:         vector.fma
// CHECK-LABEL: func.func @attention(
// CHECK:           scf.parallel
// CHECK:             call @attention_pack_tile4
// CHECK:             call @attention_product_tile4
// CHECK:           scf.parallel
// CHECK:             call @attention_attend_tile4
// CHECK:             call @attention_unpack_tile4
func.func @attention(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %length: index) -> tensor<?x8xf32> {
  %q = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.attend"(%q, %x, %x, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 2 : i64, head_size = 4 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 5.0 : f64, key_mask = false
  } : (tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, index) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// Five columns and eight take equal room in the tile, but are not the same loop.
// CHECK-LABEL: func.func private @widths_rows_tile4(
// CHECK:         scf.for %{{.*}} = %c0 to %c5 step %c1
// CHECK-LABEL: func.func private @widths_rows1_tile4(
// CHECK:         scf.for %{{.*}} = %c0 to %c8 step %c1
// CHECK-LABEL: func.func @widths(
// CHECK:             call @widths_rows_tile4
// CHECK:             call @widths_product_tile4
// CHECK:             call @widths_rows1_tile4
#M = affine_map<(t, n) -> (t, n)>
func.func @widths(%x: tensor<?x5xf32>, %w: tensor<8x5xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32> {
  %n = "kernel.map"() ({
    %0 = "kernel.read"(%x) {map = #M} : (tensor<?x5xf32>) -> f32
    %1 = arith.negf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x5xf32>
  %h = "kernel.spmm"(%n, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x5xf32>, tensor<8x5xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.map"() ({
    %0 = "kernel.read"(%h) {map = #M} : (tensor<?x8xf32>) -> f32
    %1 = arith.negf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
