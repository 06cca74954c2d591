// Panels of 32 features: two tokens' lines, interleaved; an odd last token has zeros beside it.
// RUN: gossamer-opt %s -p 'expose-storage,lower-pack-token-pairs' | filecheck %s

// CHECK-LABEL: func.func @packed(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xbf16>, %[[OUT:[a-z0-9]*]]: memref<?x?x64xbf16>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK:               vector.load %[[X]]{{.*}} vector<32xbf16>
// CHECK:               vector.maskedload %[[X]]
// CHECK-COUNT-2:       vector.store %{{.*}}, %[[OUT]][%{{.*}}] : memref<?x?x64xbf16>, vector<32xbf16>
func.func @packed(%x: tensor<?x?xbf16>) -> tensor<?x?x64xbf16> {
  %p = "kernel.pack_token_pairs"(%x) : (tensor<?x?xbf16>) -> tensor<?x?x64xbf16>
  return %p : tensor<?x?x64xbf16>
}
