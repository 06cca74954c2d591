// Squares of tokens and features are transposed in registers; of features past the last one nothing is stored.
// RUN: gossamer-opt %s -p 'expose-storage,lower-pack-tokens{bits=128}' | filecheck %s

// CHECK-LABEL: func.func @pack(
// CHECK-SAME:    %[[X:.*]]: memref<?x?xbf16>, %[[OUT:.*]]: memref<?x?x8xf32>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK-COUNT-4:       vector.maskedload %[[X]]
// CHECK:               vector.shuffle
// CHECK:               scf.if
// CHECK-COUNT-4:         vector.store %{{.*}}, %[[OUT]]
// CHECK:               else
// CHECK:                 scf.if
// CHECK:                   vector.store %{{.*}}, %[[OUT]]
func.func @pack(%x: tensor<?x?xbf16>) -> tensor<?x?x8xf32> {
  %packed = "kernel.pack_tokens"(%x) : (tensor<?x?xbf16>) -> tensor<?x?x8xf32>
  return %packed : tensor<?x?x8xf32>
}
