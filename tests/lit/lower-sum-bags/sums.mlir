// Rows are fetched ahead, wrong indices are reported, an index that is the padding is left out.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sum-bags{bits=256}' | filecheck %s

// CHECK-LABEL: func.func @sums(
// CHECK-SAME:    %[[LINES:.*]]: memref<?x?xi64>, %[[WRONG:.*]]: memref<?xi64>
// CHECK:         scf.parallel
// CHECK:           scf.for
// The rows of the first entries, then those of the entries to come.
// CHECK:             memref.prefetch %{{.*}} : memref<?x16xf32>
// CHECK:             scf.for {{.*}} iter_args(%{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}) -> (vector<8xf32>, vector<8xf32>, index)
// CHECK:               memref.prefetch
// CHECK:               arith.cmpi ult
// CHECK:               arith.cmpi ne
// CHECK:               scf.if
// CHECK:                 vector.load {{.*}} : memref<?x16xf32>, vector<8xf32>
// CHECK:                 arith.addf {{.*}} : vector<8xf32>
// CHECK:               else
// CHECK:                 memref.store {{.*}}, %[[WRONG]]
// CHECK:             vector.store {{.*}} : memref<?x16xf32>, vector<8xf32>
func.func @sums(%lines: tensor<?x?xi64>) -> tensor<?xi64> {
  %wrong = "kernel.sum_bags"(%lines) {kind = "sum", element = "f32", integers = "i64", weights = "none", columns = 16 : i64, wide = 0 : i64}
    : (tensor<?x?xi64>) -> tensor<?xi64>
  return %wrong : tensor<?xi64>
}
