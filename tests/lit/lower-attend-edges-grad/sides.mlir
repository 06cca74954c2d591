// By rows the gradient of what a row has; by rows of the transpose that of values, where `entry` says which edge is meant.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-attend-edges-grad' | filecheck %s

// CHECK-LABEL: func.func private @rows_heads(
// CHECK:         scf.for
// CHECK:           %[[SUM:.*]] = scf.for {{.*}} -> (vector<2xf32>)
// CHECK:             arith.shli %{{.*}} : vector<2xi32>
// CHECK:             vector.shuffle
// CHECK:             arith.addf {{.*}} : vector<2xf32>
// CHECK:           vector.store %[[SUM]], %{{.*}} : memref<?x2xf32>, vector<2xf32>
// CHECK-LABEL: func.func @rows(
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @rows(%a: tensor<?x?xf32, #CSR>, %v: tensor<?x16xf32>, %t: tensor<?x2xf32>, %s: tensor<?x4xf32>,
                %g: tensor<?x16xf32>, %d: tensor<?x2xf32>) -> tensor<?x2xf32> {
  %0 = "kernel.attend_edges_grad"(%a, %v, %t, %s, %g, %d) {
    side = "target", heads = 2 : i64, weighted = 0 : i64, scale = 1.0 : f64, slope = 0.2 : f64,
    dropout = 0.0 : f64,
    operandSegmentSizes = array<i32: 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0>
  } : (tensor<?x?xf32, #CSR>, tensor<?x16xf32>, tensor<?x2xf32>, tensor<?x4xf32>, tensor<?x16xf32>, tensor<?x2xf32>) -> tensor<?x2xf32>
  return %0 : tensor<?x2xf32>
}

// CHECK-LABEL: func.func private @columns_heads(
// CHECK:         scf.for
// CHECK:           scf.for {{.*}} -> (vector<16xf32>)
// CHECK-COUNT-4:     memref.prefetch
// CHECK:             %[[ENTRY:.*]] = memref.load %{{.*}} : memref<?xi32>
// CHECK:             %[[NUMBER:.*]] = arith.index_castui %[[ENTRY]]
// CHECK:             memref.load %{{.*}}[%[[NUMBER]], %{{.*}}] : memref<?x1xf32>
// CHECK:             vector.fma
// CHECK-LABEL: func.func @columns(
func.func @columns(%a: tensor<?x?xf32, #CSR>, %v: tensor<?x16xf32>, %e: tensor<?x1xf32>, %s: tensor<?x4xf32>,
                   %g: tensor<?x16xf32>, %d: tensor<?x2xf32>, %n: tensor<?xi32>) -> tensor<?x16xf32> {
  %0 = "kernel.attend_edges_grad"(%a, %v, %e, %s, %g, %d, %n) {
    side = "source", heads = 2 : i64, weighted = 0 : i64, scale = 1.0 : f64, slope = 1.0 : f64,
    dropout = 0.0 : f64,
    operandSegmentSizes = array<i32: 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1>, resultSegmentSizes = array<i32: 0, 0, 0, 0, 0, 0, 0, 1>
  } : (tensor<?x?xf32, #CSR>, tensor<?x16xf32>, tensor<?x1xf32>, tensor<?x4xf32>, tensor<?x16xf32>, tensor<?x2xf32>, tensor<?xi32>)
    -> tensor<?x16xf32>
  return %0 : tensor<?x16xf32>
}
