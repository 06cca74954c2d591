// Blocks of 32 columns: two vectors of them for each of 8 rows, whose pairs of tokens are in all lanes.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sample-blocks' | filecheck %s

// CHECK-LABEL: func.func @sampled(
// CHECK-SAME:    %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[X:[a-z0-9]*]]: memref<?x?x64xbf16>, %[[Y:[a-z0-9]*]]: memref<?x?x64xbf16>, %[[OUT:[a-z0-9]*]]: memref<?xbf16>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               memref.load %[[CRD]]
// CHECK:               scf.for
// CHECK:                 scf.for {{.*}} iter_args
// CHECK-COUNT-2:           vector.load %[[Y]]
// CHECK:                   vector.load %[[X]]{{.*}} vector<2xbf16>
// CHECK-COUNT-16:          x86.avx512.dot
// CHECK-COUNT-16:        vector.store %{{.*}}, %[[OUT]][%{{.*}}] : memref<?xbf16>, vector<16xbf16>
func.func @sampled(%p: tensor<?xi32>, %c: tensor<?xi32>, %x: tensor<?x?x64xbf16>, %y: tensor<?x?x64xbf16>) -> tensor<?xbf16> {
  %v = "kernel.sample_blocks"(%p, %c, %x, %y)
    : (tensor<?xi32>, tensor<?xi32>, tensor<?x?x64xbf16>, tensor<?x?x64xbf16>) -> tensor<?xbf16>
  return %v : tensor<?xbf16>
}
