// Sums go through the epilogue into y, but for those of a row that is cut: it is complete when its parts are added up. Of the
// functions there are those that 6 columns need.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-rows' | filecheck %s

// CHECK-LABEL: func.func private @spmm_columns1(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x6xf32>, %[[B:[a-z0-9]*]]: memref<?xf32>, %[[S:[a-z0-9]*]]: memref<?x1xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32, strided<[?, 1], offset: ?>>, %[[FIRST:[a-z0-9]*]]: index, %[[LOW:[a-z0-9]*]]: index, %[[HIGH:[a-z0-9]*]]: index, %{{[a-z0-9]*}}: index, %{{[a-z0-9]*}}: index, %[[COMPLETE:[a-z0-9]*]]: index)
// CHECK:         scf.for %[[ROW:.*]] = %[[LOW]] to %[[HIGH]]
// CHECK-COUNT-2:     scf.for
// CHECK:           %[[SUMS:.*]] = arith.addf {{.*}} : vector<8xf32>
// CHECK:           %[[DONE:.*]] = arith.cmpi ult, %[[ROW]], %[[COMPLETE]]
// CHECK:           scf.if %[[DONE]] {
// CHECK:             vector.maskedload %[[B]]
// CHECK:             memref.load %[[S]][%[[ROW]],
// CHECK:             %[[RESULT:.*]] = arith.mulf
// CHECK:             vector.maskedstore %[[Y]]{{.*}}, %[[RESULT]]
// CHECK:           } else {
// CHECK:             vector.maskedstore %[[Y]]{{.*}}, %[[SUMS]]
// CHECK-NOT:   func.func private
// CHECK-LABEL: func.func @spmm(
// CHECK:         scf.parallel
// CHECK:         scf.for
// CHECK:           arith.addf {{.*}} : vector<8xf32>
// CHECK:           scf.if
// CHECK:             arith.mulf {{.*}} : vector<8xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x6xf32>, %b: tensor<?xf32>, %s: tensor<?x1xf32>) -> tensor<?x6xf32> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    %bias = "kernel.read"(%b) {map = affine_map<(d0, d1) -> (d1)>} : (tensor<?xf32>) -> f32
    %scale = "kernel.read"(%s) {map = affine_map<(d0, d1) -> (d0, 0)>} : (tensor<?x1xf32>) -> f32
    %0 = arith.addf %sum, %bias : f32
    %1 = arith.mulf %0, %scale : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 8 : i64, vectors = 2 : i64, ahead = 2 : i64, gathers = 0 : i64} : (tensor<?x?xf32, #CSR>, tensor<?x6xf32>) -> tensor<?x6xf32>
  return %y : tensor<?x6xf32>
}
