// A low rank beside a sparse product: its first factor is a stage, and the second is in the epilogue.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' --split-input-file | filecheck %s

// The product keeps its sums in the tile until a vector of rows is whole. Then several rows at once get those of the low rank, each
// of whose loads of tokens serves all of them, and the result is stored. No loop over few features is unrolled as a whole: the
// vectors would not fit into the registers.
// CHECK: llvm.loop_unroll<disable = true>
// CHECK-LABEL: func.func private @lora_rows_tile4(
// CHECK:         scf.for %{{.*}} = %c0 to %c8 step %c1 iter_args(
// CHECK:           memref.load %{{.*}} : memref<2x8xf32>
// CHECK:           vector.fma
// CHECK:         } {llvm.loop_annotation
// CHECK-LABEL: func.func private @lora_product_tile4(
// CHECK:         scf.for %{{.*}} = %c0 to %c2 step %c1 iter_args(
// CHECK:           memref.load %{{.*}} : memref<8x2xf32>
// CHECK:           vector.fma
// CHECK:         } {llvm.loop_annotation
// CHECK:         vector.maskedstore
// CHECK-LABEL: func.func @lora(
// CHECK:             call @lora_pack_tile4
// CHECK:             call @lora_rows_tile4
// CHECK:             call @lora_product_tile4
// CHECK-NOT:         call @lora_unpack
func.func @lora(
    %x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %a: tensor<2x8xf32>, %b: tensor<8x2xf32>
) -> tensor<?x8xf32> {
  %h = "kernel.map"() ({
    %0 = "kernel.inner"(%x, %a) {reduction = 1 : i64} : (tensor<?x8xf32>, tensor<2x8xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) : () -> tensor<?x2xf32>
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = "kernel.inner"(%h, %b) {reduction = 1 : i64} : (tensor<?x2xf32>, tensor<8x2xf32>) -> f32
    %1 = arith.addf %sum, %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// A single product with such an epilogue is a chain, too: tokens of the low rank come from outside, its factor as [R, M].
// CHECK-LABEL: func.func private @alone_product_tile4(
// CHECK:         memref.load %{{.*}} : memref<2x8xf32>
// CHECK-LABEL: func.func @alone(
// CHECK:             call @alone_pack_tile4
// CHECK:             call @alone_pack1_tile4
// CHECK:             call @alone_product_tile4
func.func @alone(
    %x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %h: tensor<?x2xf32>, %b: tensor<2x8xf32>
) -> tensor<?x8xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = "kernel.inner"(%h, %b) {reduction = 0 : i64} : (tensor<?x2xf32>, tensor<2x8xf32>) -> f32
    %1 = arith.addf %sum, %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
