// Lanes without a bit stay as they are in memory; lines to come are fetched.
// RUN: gossamer-opt %s -p 'expose-storage,lower-mapped-rows' | filecheck %s

// CHECK-LABEL: func.func @put(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi32>, %[[M:[a-z0-9]*]]: memref<?x?xi8>, %[[V:[a-z0-9]*]]: memref<?xf64>, %[[OUT:[a-z0-9]*]]: memref<?x?xf64>
// CHECK:         scf.parallel
// CHECK:           memref.load %[[M]]
// CHECK:           %[[BITS:.*]] = vector.bitcast %{{.*}} : vector<1xi8> to vector<8xi1>
// CHECK:           memref.prefetch %[[OUT]]{{.*}}, write
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v8f64"
// CHECK:           vector.maskedstore %[[OUT]]{{.*}}, %[[BITS]]
func.func @put(%p: tensor<?xi32>, %m: tensor<?x?xi8>, %v: tensor<?xf64>) -> tensor<?x?xf64> {
  %d = "kernel.put_mapped"(%p, %m, %v) : (tensor<?xi32>, tensor<?x?xi8>, tensor<?xf64>) -> tensor<?x?xf64>
  return %d : tensor<?x?xf64>
}
