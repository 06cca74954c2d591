// Rows in parts of equal work, found by bisection; columns in tiles of up to 2 vectors, the last one masked; what parts have
// summed of rows that they begin within is added at the end. Rows of a large x are fetched ahead.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-rows' --split-input-file | filecheck %s

// CHECK-LABEL: func.func private @spmm_columns2(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32, strided<[?, 1], offset: ?>>, %{{[a-z0-9]*}}: index, %[[LOW:[a-z0-9]*]]: index, %[[HIGH:[a-z0-9]*]]: index
// CHECK:         %[[MASK:.*]] = vector.create_mask
// CHECK:         scf.for %[[ROW:.*]] = %[[LOW]] to %[[HIGH]]
// CHECK:           %[[SUMS:.*]]:2 = scf.for %[[P:.*]] = %{{.*}} to %{{.*}} step %{{.*}} iter_args(%{{.*}}, %{{.*}}) -> (vector<8xf32>, vector<8xf32>)
// CHECK:             memref.prefetch %[[X]]{{.*}}, read, locality<2>, data
// CHECK:             vector.load %[[X]]
// CHECK:             vector.maskedload %[[X]]{{.*}}, %[[MASK]]
// CHECK-COUNT-2:     math.fma
// CHECK:           vector.store %[[SUMS]]#0, %[[Y]]
// CHECK:           vector.maskedstore %[[Y]]{{.*}}, %[[MASK]], %[[SUMS]]#1
// CHECK-LABEL: func.func private @spmm_columns1(
// CHECK-LABEL: func.func private @spmm_column(
// CHECK-LABEL: func.func private @spmm_column_gathered(
// CHECK:         vector.gather
// CHECK:         vector.reduction <add>
// CHECK-LABEL: func.func @spmm(
// CHECK:         scf.for
// CHECK:           scf.parallel
// CHECK-COUNT-2:     scf.while
// CHECK:             func.call @spmm_column_gathered
// CHECK:             func.call @spmm_column(
// CHECK:             func.call @spmm_columns2
// CHECK:             func.call @spmm_columns1
// CHECK:           scf.for
// CHECK:             scf.while
// CHECK:             scf.if
// CHECK:               arith.addf
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, vectors = 2 : i64, ahead = 2 : i64, gathers = 1 : i64} : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// A vector of a narrow type: sums are wide, and rows, whose partial sums would be rounded, are not cut.
// CHECK-LABEL: func.func private @spmv_column(
// CHECK:         arith.extf %{{.*}} : bf16 to f32
// CHECK:         math.fma %{{.*}} : f32
// CHECK:         arith.truncf %{{.*}} : vector<1xf32> to vector<1xbf16>
// CHECK-NOT:   func.func private @spmv_column
// CHECK-LABEL: func.func @spmv(
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @spmv(%a: tensor<?x?xbf16, #CSR>, %x: tensor<?xbf16>) -> tensor<?xbf16> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    %narrow = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%narrow) : (bf16) -> ()
  }) {lanes = 8 : i64, vectors = 2 : i64, ahead = 2 : i64, gathers = 0 : i64} : (tensor<?x?xbf16, #CSR>, tensor<?xbf16>) -> tensor<?xbf16>
  return %y : tensor<?xbf16>
}
