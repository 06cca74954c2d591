// A chain with several results: each is unpacked right after the stage that computes it, into memory of its own.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func @both(
// CHECK:           scf.parallel
// CHECK:             call @both_pack_tile4
// CHECK:             call @both_product_tile4
// CHECK:             call @both_unpack_tile4
// CHECK:             call @both_product1_tile4
// CHECK:             call @both_unpack1_tile4
// CHECK-NOT:       bufferization.materialize_in_destination
func.func @both(
    %x: tensor<?x8xf32>, %up: tensor<16x8xf32, "rowpairs(reduction=1, width=16)">, %down: tensor<8x16xf32, "rowpairs(reduction=1, width=16)">
) -> (tensor<?x16xf32>, tensor<?x8xf32>) {
  %h = "kernel.spmm"(%x, %up) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x8xf32>, tensor<16x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x16xf32>
  %y = "kernel.spmm"(%h, %down) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x16xf32>, tensor<8x16xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %h, %y : tensor<?x16xf32>, tensor<?x8xf32>
}
