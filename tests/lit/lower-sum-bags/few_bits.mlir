// Tables of four bits: a byte is two columns, half a row apart; rows are multiplied with their scales and weights.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sum-bags{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @few_bits(
// CHECK:         vector.load {{.*}} : memref<?x8xi8>, vector<8xi8>
// CHECK:         arith.shli
// CHECK:         arith.shrsi
// CHECK:         arith.shrsi
// CHECK:         arith.sitofp {{.*}} : vector<8xi8> to vector<8xf32>
// CHECK:         arith.sitofp {{.*}} : vector<8xi8> to vector<8xf32>
// CHECK:         vector.fma
// CHECK:         vector.store {{.*}} : memref<?x16xf32>, vector<8xf32>
// CHECK:         vector.store {{.*}} : memref<?x16xf32>, vector<8xf32>
func.func @few_bits(%lines: tensor<?x?xi64>) -> tensor<?xi64> {
  %wrong = "kernel.sum_bags"(%lines) {kind = "sum", element = "i4", integers = "i32", weights = "f32", columns = 16 : i64, wide = 0 : i64}
    : (tensor<?x?xi64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
