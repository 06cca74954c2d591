// Blocks of 16 columns: one vector of them for each of the 16 rows.
// RUN: gossamer-opt %s -p 'expose-storage,lower-sample-blocks' | filecheck %s

// CHECK-LABEL: func.func @sampled(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?x32xbf16>, %[[Y:[a-z0-9]*]]: memref<?x?x32xbf16>, %[[OUT:[a-z0-9]*]]: memref<?xbf16>
// CHECK:         scf.for {{.*}} iter_args
// CHECK:           vector.load %[[Y]]
// CHECK-COUNT-16:  x86.avx512.dot
func.func @sampled(%p: tensor<?xi32>, %c: tensor<?xi32>, %x: tensor<?x?x32xbf16>, %y: tensor<?x?x32xbf16>) -> tensor<?xbf16> {
  %v = "kernel.sample_blocks"(%p, %c, %x, %y)
    : (tensor<?xi32>, tensor<?xi32>, tensor<?x?x32xbf16>, tensor<?x?x32xbf16>) -> tensor<?xbf16>
  return %v : tensor<?xbf16>
}
