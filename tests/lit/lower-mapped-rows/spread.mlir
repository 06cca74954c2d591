// Values are expanded to the bits of each word: past the caches in a large matrix.
// RUN: gossamer-opt %s -p 'expose-storage,lower-mapped-rows' | filecheck %s

// CHECK-LABEL: func.func @spread(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[M:[a-z0-9]*]]: memref<?x?xi16>, %[[V:[a-z0-9]*]]: memref<?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x?xf32>
// CHECK:         scf.parallel
// CHECK:           scf.if
// CHECK:             memref.load %[[P]]
// CHECK:             scf.for
// CHECK:               scf.for
// CHECK:                 %[[BITS:.*]] = memref.load %[[M]]
// CHECK:                 %[[COUNT:.*]] = math.ctpop %[[BITS]] : i16
// CHECK:                 vector.maskedload %[[V]]
// CHECK:                 llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v16f32"
// CHECK:                 vector.store %{{.*}}, %[[OUT]]{{.*}} {alignment = 64 : i64, nontemporal = true}
// CHECK:           else
// CHECK:                 vector.store %{{.*}}, %[[OUT]]
// CHECK-NOT:             nontemporal
func.func @spread(%p: tensor<?xi64>, %m: tensor<?x?xi16>, %v: tensor<?xf32>) -> tensor<?x?xf32> {
  %d = "kernel.spread_mapped"(%p, %m, %v) : (tensor<?xi64>, tensor<?x?xi16>, tensor<?xf32>) -> tensor<?x?xf32>
  return %d : tensor<?x?xf32>
}
