// An epilogue of two results: the sums are transposed first, then each value goes into its memory.
// RUN: gossamer-opt %s -p 'expose-storage,lower-broadcast,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile16(
// CHECK-SAME:    %[[FIRST:[a-z0-9]*]]: memref<?x7xf32>, %[[SECOND:[a-z0-9]*]]: memref<?x7xf32>, %{{[a-z0-9]*}}: memref<?xi8>
// CHECK:         %[[TANH:.*]] = math.tanh %[[SUMS:.*]] : vector<16xf32>
// CHECK:         %[[SQUARE:.*]] = arith.mulf %[[TANH]], %[[TANH]] : vector<16xf32>
// CHECK:         vector.maskedstore %[[FIRST]][%{{.*}}], %{{.*}}, %[[TANH]]
// CHECK-NEXT:    vector.maskedstore %[[SECOND]][%{{.*}}], %{{.*}}, %[[SQUARE]]
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> (tensor<?x7xf32>, tensor<?x7xf32>) {
  %y:2 = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = math.tanh %sum : f32
    %1 = arith.mulf %0, %0 : f32
    "kernel.yield"(%0, %1) : (f32, f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [16]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> (tensor<?x7xf32>, tensor<?x7xf32>)
  return %y#0, %y#1 : tensor<?x7xf32>, tensor<?x7xf32>
}
