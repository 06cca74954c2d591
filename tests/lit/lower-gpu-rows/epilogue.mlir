// What the warps have summed up of a long row is added up, then all rows go through the epilogue.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-gpu-rows,canonicalize,cse' | filecheck %s

// CHECK-LABEL: gpu.func @spmm_r32(
// CHECK-SAME:    %[[B:[a-z0-9]*]]: memref<?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x?xf32>)
// CHECK:         gpu.shuffle xor
// CHECK:         gpu.barrier
// CHECK:         gpu.barrier
// CHECK:         vector.load %[[B]][%{{.*}}] {{.*}} : memref<?xf32>, vector<1xf32>
// CHECK:         } else {
// CHECK:           gpu.barrier
// CHECK:           gpu.barrier
// CHECK:           %[[BIAS:.*]] = vector.load %[[B]][%{{.*}}] {alignment = 16 : i64} : memref<?xf32>, vector<4xf32>
// CHECK:           %[[Y:.*]] = arith.addf %{{.*}}, %[[BIAS]] : vector<4xf32>
// CHECK:           vector.store %[[Y]], %[[OUT]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %b: tensor<?xf32>) -> tensor<?x?xf32> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    %bias = "kernel.read"(%b) {map = affine_map<(d0, d1) -> (d1)>} : (tensor<?xf32>) -> f32
    %0 = arith.addf %sum, %bias : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, vectors = 8 : i64, ahead = 2 : i64, gathers = 0 : i64} : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
