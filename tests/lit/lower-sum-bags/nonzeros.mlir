// Tables of nonzeros: bits say to which columns the next ones belong.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sum-bags{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @nonzeros(
// CHECK:         memref.load {{.*}} : memref<?xi32>
// CHECK:         vector.load {{.*}} : memref<?x2xi8>, vector<1xi8>
// CHECK:         vector.bitcast {{.*}} : vector<1xi8> to vector<8xi1>
// CHECK:         vector.expandload {{.*}} : memref<?xf32>, vector<8xi1>, vector<8xf32> into vector<8xf32>
// CHECK:         math.ctpop
// CHECK:         vector.expandload
// CHECK:         vector.store {{.*}} : memref<?x16xf32>, vector<8xf32>
func.func @nonzeros(%lines: tensor<?x?xi64>) -> tensor<?xi64> {
  %wrong = "kernel.sum_bags"(%lines) {kind = "sum", element = "nonzeros", integers = "i64", weights = "none", columns = 16 : i64, wide = 1 : i64}
    : (tensor<?x?xi64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
