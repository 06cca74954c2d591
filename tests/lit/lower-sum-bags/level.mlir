// Rows go to the second-level cache; to the first one where a processor streams past its second level.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sum-bags{bits=256}' | filecheck %s
// RUN: gossamer-opt %s -p 'expose-storage,lower-sum-bags{bits=256 streams=true}' | filecheck %s --check-prefix=FIRST

// CHECK:     memref.prefetch {{.*}} read, locality<2>, data
// CHECK-NOT: locality<3>
// FIRST:     memref.prefetch {{.*}} read, locality<3>, data
// FIRST-NOT: locality<2>
func.func @level(%lines: tensor<?x?xi64>) -> tensor<?xi64> {
  %wrong = "kernel.sum_bags"(%lines) {kind = "sum", element = "f32", integers = "i64", weights = "none", columns = 16 : i64, wide = 0 : i64}
    : (tensor<?x?xi64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
