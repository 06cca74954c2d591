// Parts of equal entries; x is read once for four entries, whose sums across lanes are shared; entries left one by one.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-dots' | filecheck %s

// CHECK-LABEL: func.func @sddmm(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %{{.*}}: memref<?xf32>, %{{.*}}: index, %{{.*}}: index, %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32>, %[[OUT:[a-z0-9]*]]: memref<?xf32>
// CHECK:         scf.parallel
// CHECK-COUNT-2:   scf.while
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK-COUNT-4:       memref.load %[[CRD]]
// CHECK:               scf.for {{.*}} -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>)
// CHECK:                 vector.load %[[X]]
// CHECK-COUNT-4:         vector.load %[[Y]]
// CHECK:               scf.for
// CHECK:                 vector.maskedload %[[X]]
// CHECK-COUNT-4:         vector.maskedload %[[Y]]
// CHECK:               vector.shuffle
// CHECK:               vector.store %{{.*}}, %[[OUT]][%{{.*}}] : memref<?xf32>, vector<4xf32>
// CHECK:             scf.for
// CHECK:               vector.store %{{.*}}, %[[OUT]][%{{.*}}] : memref<?xf32>, vector<1xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @sddmm(%s: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %y: tensor<?x?xf32>) -> tensor<?xf32> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i, k)>} : (tensor<?x?xf32>) -> f32
    %1 = "kernel.read"(%y) {map = affine_map<(i, j, k) -> (j, k)>} : (tensor<?x?xf32>) -> f32
    %2 = arith.mulf %0, %1 : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {lanes = 8 : i64, reduced = 1 : i64, together = 4 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
