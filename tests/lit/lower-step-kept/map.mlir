// Where a map tells the entries, vectors of a row are compressed and expanded.
// RUN: gossamer-opt %s -p 'expose-storage,lower-step-kept' | filecheck %s

// CHECK-LABEL: func.func @step(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[B:[a-z0-9]*]]: memref<?x?xi8>, %[[G:[a-z0-9]*]]: memref<?xf64>, %[[RATES:[a-z0-9]*]]: memref<?xf64>, %[[D:[a-z0-9]*]]: memref<?x?xf64>, %[[M:[a-z0-9]*]]: memref<?xf64>, %[[S:[a-z0-9]*]]: memref<?xf64>, %[[W:[a-z0-9]*]]: memref<?x?xf64>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               memref.load %[[B]]
// CHECK:               memref.prefetch %[[D]]{{.*}}, write
// CHECK:               vector.load %[[D]]
// CHECK:               llvm.call_intrinsic "llvm.x86.avx512.mask.compress.v8f64"
// CHECK:               vector.maskedstore %[[W]]
// CHECK:             scf.for
// CHECK:               math.sqrt {{.*}} : vector<8xf64>
// CHECK:             scf.for
// CHECK:               vector.maskedload %[[W]]
// CHECK:               llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v8f64"
// CHECK:               vector.maskedstore %[[D]]
func.func @step(%p: tensor<?xi64>, %b: tensor<?x?xi8>, %g: tensor<?xf64>, %r: tensor<?xf64>)
    -> (tensor<?x?xf64>, tensor<?xf64>, tensor<?xf64>, tensor<?x?xf64>) {
  %d, %m, %s, %w = "kernel.step_mapped"(%p, %b, %g, %r)
    : (tensor<?xi64>, tensor<?x?xi8>, tensor<?xf64>, tensor<?xf64>) -> (tensor<?x?xf64>, tensor<?xf64>, tensor<?xf64>, tensor<?x?xf64>)
  return %d, %m, %s, %w : tensor<?x?xf64>, tensor<?xf64>, tensor<?xf64>, tensor<?x?xf64>
}
